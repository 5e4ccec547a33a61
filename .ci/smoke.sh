#!/usr/bin/env bash
# Trains a few steps at toy size, continues, and generates: with whichever environment runs it.
set -euo pipefail
run=$(mktemp -d)/run
train() {
  "$@" train quickstart --run-dir "$run" \
    --set model.decoder.num_layers=1 --set model.decoder.hidden_dim=32 --set input.batch_size=2 \
    --set input.sequence_length=32 --set evaluators={} --steps "$steps"
}
steps=2 train "$@"
steps=3 train "$@"
"$@" generate "$run" --prompt "def " --max-tokens 4
"$@" plugins doctor | tail -n 1
