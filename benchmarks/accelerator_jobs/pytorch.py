"""Part 3: the same training step in PyTorch, with `torch.compile` and its faster attention kernel. Does not import JAX."""

import contextlib
import functools
import gc
import importlib.util
import statistics
import time
from typing import Any

import numpy as np

from accelerator_jobs.context import Context
from accelerator_jobs.models import BETAS, CLIP, DECAY, EPS, RATE, shape_of
from accelerator_jobs.timing import OutOfMemoryError, is_out_of_memory, median_seconds

WARMUPS, STEPS = 3, 8
ROW = "torch.compile"


def measure(context: Context, name: str) -> None:
    """Record a row for each attention kernel, and one for the step with the fastest kernel."""
    if importlib.util.find_spec("torch") is None:
        context.record(ROW, skipped="torch is not installed, so there is nothing to compare with")
        return
    import torch

    if not context.rehearsal and not torch.cuda.is_available():
        context.record(ROW, skipped="torch found no CUDA device, so there is nothing to compare with")
        return
    context.record("device", kind=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shape = shape_of(name, rehearsal=context.rehearsal)
    best = choose_attention(context, shape)
    context.attempt(ROW, functools.partial(step_figures, context, shape, best), seconds=25)


def choose_attention(context: Context, shape: Any) -> tuple[str | None, bool]:
    """Return the fastest backend for the shape, forward and backward, and whether it supports groups of heads."""
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        context.record("attention", skipped="backends of CUDA; PyTorch chooses its own on a CPU")
        return None, True
    results = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for grouped in (True, False):
            title = f"attention {backend.name}{'' if grouped else ', keys repeated'}"
            figures = context.attempt(title, functools.partial(_attention_figures, shape, backend, grouped))
            if figures and "seconds" in figures:
                results[figures["seconds"]] = (backend.name, grouped)
                break  # repeat keys for kernels that do not support groups
    return results[min(results)] if results else (None, False)


def _attention_figures(shape: Any, backend: Any, grouped: bool) -> dict[str, Any]:
    import torch
    from torch.nn.attention import sdpa_kernel

    from accelerator_jobs.llama_pytorch import attend

    size = shape.width // shape.heads
    q, k, v = (
        torch.randn(2, n, shape.length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    weights = torch.randn_like(q)

    def run() -> None:
        attend(q, k, v, grouped=grouped).backward(weights)

    try:
        with sdpa_kernel(backend):
            return median_seconds(run, lambda _: torch.cuda.synchronize(), seconds=0.5)
    except RuntimeError as error:
        return {"refused": str(error).splitlines()[0][:200]}


def step_figures(context: Context, shape: Any, attention: tuple[str | None, bool]) -> dict[str, Any]:
    """Return the figures at our batch size.

    If saving all activations does not fit, recomputes each layer. If that does not fit either, reduces the batch.
    """
    too_large: list[str] = []
    batch = shape.batch
    while batch >= 1:
        for checkpointed in (False, True):
            try:
                figures = _measure_batch(shape, attention, batch, checkpointed)
                return figures | {"batch": batch, "checkpointed": checkpointed, "too_large": too_large}
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                too_large.append(f"{batch} rows, {'checkpointed' if checkpointed else 'all kept'}")
            _release()
        batch //= 2
    raise OutOfMemoryError(f"one row does not fit: {too_large}")


def _release() -> None:
    import torch

    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measure_batch(shape: Any, attention: tuple[str | None, bool], batch: int, checkpointed: bool) -> dict[str, Any]:
    import torch

    from accelerator_jobs.llama_pytorch import Llama

    backend, grouped = attention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Llama(shape, grouped=grouped, checkpointed=checkpointed)
    model.reset()
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **fused)
    # In a rehearsal on a CPU, PyTorch's C++ compiler would take minutes.
    compiler = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(model, backend=compiler)
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (batch, shape.length), dtype=np.int32)
    data = [torch.from_numpy(x).long().to(device) for x in (tokens, np.roll(tokens, -1, 1))]

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    seconds, losses = [], []
    started = time.perf_counter()
    first = 0.0
    with _kernel(backend):
        for index in range(WARMUPS + STEPS):
            start = time.perf_counter()
            loss = step()
            if device == "cuda":
                torch.cuda.synchronize()
            if index == 0:
                first = time.perf_counter() - started
            if index >= WARMUPS:
                seconds.append(time.perf_counter() - start)
            losses.append(loss.item())
    median = statistics.median(seconds)
    return {
        "step_seconds": median,
        "step_seconds_all": seconds,
        "tokens_per_second": batch * shape.length / median,
        "compile_seconds": first,
        "losses": [losses[0], losses[-1]],
        "parameters": sum(p.numel() for p in model.parameters()),
        "attention": backend,
        "compiler": compiler,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "torch": torch.__version__,
    }


def _kernel(backend: str | None) -> Any:
    """Return a context that restricts PyTorch's attention to one backend."""
    if backend is None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))
