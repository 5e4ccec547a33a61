set -u
folder=@FOLDER@
run_dir=@RUN_DIR@
hosts=@HOSTS@
per_host=@PER_HOST@
mkdir -p "$folder/exits"
@RUN_FILE@
# Unset variables of an outer job from which this one was submitted.
for name in $(compgen -e); do
  case $name in MEGASCALE_*|JAX_COORDINATOR_*|JAX_NUM_PROCESSES|JAX_PROCESS_ID|MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK) unset "$name" ;; esac
done
@EXPORTS@
export PYTHONUNBUFFERED=1 AXLEARN_PROCESSES=$((hosts * per_host)) AXLEARN_EXITS=$folder/exits AXLEARN_KEEP=@KEEP@
export AXLEARN_LOCAL_CHIPS=@LOCAL_CHIPS@ AXLEARN_EVENTS=@EVENTS@
@SETUP@
say() { echo "axlearn: $*" >&2; }

# Print the name and address of each node that responds. Nodes are only probed after a failure.
nodes() {
  sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %o %t' | sort -u > "$folder/nodes"
  rm -f "$folder"/answer-*
  while read -r node address state; do
    case $state in alloc|mix|comp|idle|resv|plnd) ;; *) continue ;; esac
    if [ "$1" = ask ]; then
      timeout 60 srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap --immediate=30 --mem=0 true \
        < /dev/null > /dev/null 2>&1 && touch "$folder/answer-$node" &
    else
      touch "$folder/answer-$node"
    fi
  done < "$folder/nodes"
  wait
  while read -r node address state; do
    [ -e "$folder/answer-$node" ] && echo "$node $address"
  done < "$folder/nodes"
}

saves() { grep -c '"event": "saved"' "$run_dir/phases.jsonl" 2> /dev/null || true; }

# Slurm sends USR1 before the time limit, and TERM for a preemption or `scancel`. Trainers save in the remaining time.
notice='' step=''
pass_on() { notice=$1; [ -n "$step" ] && kill -TERM "$step" 2> /dev/null; }
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM INT

count=0 barren=0 found=use
while :; do
  export AXLEARN_ATTEMPT=$((SLURM_JOB_ID * 97 + ${SLURM_RESTART_COUNT:-0} * 211 + count))
  mapfile -t healthy < <(nodes $found)
  if [ ${#healthy[@]} -lt "$hosts" ]; then
    say "only ${#healthy[@]} of the nodes $SLURM_JOB_NODELIST respond, but $hosts must train: requeueing the job"
    scontrol requeue "$SLURM_JOB_ID" || exit 74
    sleep 600
    exit 74
  fi
  chosen=("${healthy[@]:0:$hosts}")
  names=$(IFS=,; echo "${chosen[*]%% *}")
  export AXLEARN_COORDINATOR=${chosen[0]#* }
  before=$(saves)
  say "attempt $count on $names"
  # Slurm may count a step as running while one of its nodes is down. `--overlap` does not wait for its resources.
  srun --nodes="$hosts" --ntasks=$((hosts * per_host)) --ntasks-per-node="$per_host" --nodelist="$names" \
    --overlap --kill-on-bad-exit=1 --wait=60 --cpu-bind=none --label --input=none --export=ALL \
    @COMMAND@ &
  step=$!
  while :; do  # a signal ends `wait` early
    wait "$step"
    code=$?
    kill -0 "$step" 2> /dev/null || break
  done
  step=''
  if [ "$code" = 0 ]; then exit 0; fi
  if [ "$notice" = USR1 ]; then
    say "the time limit is near and the run was saved: requeueing the job"
    scontrol requeue "$SLURM_JOB_ID" || exit 143
    sleep 600
    exit 143
  fi
  if [ "$notice" = TERM ]; then exit 143; fi
  for final in @FINAL@; do
    if rank=$(grep -lx "$final" "$folder/exits/$AXLEARN_ATTEMPT-"* 2> /dev/null | head -n 1) && [ -n "$rank" ]; then
      say "exit code $final (@MEANING@) of rank ${rank##*-}: another attempt would fail in the same way"
      exit "$final"
    fi
  done
  count=$((count + 1)) found=ask
  if [ "$(saves)" = "$before" ]; then barren=$((barren + 1)); else barren=0; fi
  if [ "$barren" -ge @CRASH_LOOP@ ]; then
    say "crash loop: $barren attempts in a row saved nothing; the last ended with code $code"
    exit "$code"
  fi
  if [ "$count" -gt @RESTARTS@ ]; then
    say "$count attempts failed, the last with code $code"
    exit "$code"
  fi
  say "attempt $((count - 1)) ended with code $code: restarting from the newest checkpoint"
done
