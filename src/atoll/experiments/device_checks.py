"""The computing checks of `atoll doctor`: numerics, speed and memory of a device, and all-reduce between several."""

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from atoll.diffusion.objective import get_objective
from atoll.diffusion.solvers import uniform_times
from atoll.experiments.children import in_children, reason
from atoll.networks.dit import DiT, DiTConfig
from atoll.networks.expert import Expert
from atoll.networks.presets import preset
from atoll.sampling.ensemble import Ensemble, generate
from atoll.sampling.expert import Prompts, VelocityExpert
from atoll.training.distributed import Distributed
from atoll.training.loop import Learner
from atoll.training.memory import CUDA_BASE, available, in_words, peak_resident, predict
from atoll.training.roofline import DEVICES, Device, sampling_work, training_work
from atoll.training.settings import Settings
from atoll.training.task import Batch, Tensors, seeded

Verdict = Literal["ok", "note", "warn", "fail"]
Values = dict[str, float | str | bool]

DTYPES = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # relative; TF32 is off
UNTRUSTED = "do not trust results of this device: update its driver and PyTorch, and test its memory"
KERNELS = {
    SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN", SDPBackend.MATH: "unfused",
}  # fmt: skip
HEADS, HEAD_WIDTH, NUM_TOKENS, NUM_TEXT = 16, 72, 256, 77  # of xl/2; of a 256-pixel image and a CLIP text
STEPS = 50  # of sampling
FAIR_SHARE = 0.25  # minimum share of the roofline bound that a healthy GPU reaches
FAIR_PEAK = 0.5  # minimum share of the published peak that a large product reaches on a healthy GPU
SLOW_BUS = 5e9  # bytes per second
PEAK_SIZES = {"cuda": (8192, 1 << 29), "cpu": (1024, 1 << 28)}  # rows of a large matrix, bytes of a large copy
SENT = 1 << 28  # bytes copied to a GPU
FAIR_MEMORY = 1.2  # times the prediction
SLOW = "usual causes: another process on the GPU, a power limit, heat (see `nvidia-smi`), a slow CPU"
COMPILE_LIMIT, REDUCE_LIMIT, BENCHMARK_LIMIT = 40, 30, 90  # seconds
PAPERS = DiTConfig(**preset("xl/2"))  # the papers' expert


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    group: str
    name: str
    verdict: Verdict
    text: str
    values: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """The device and folder to check, and how thoroughly."""

    device: torch.device
    folder: Path = Path()
    quick: bool = False
    missing: str | None = None  # the requested device, if this machine does not have it
    driver_fault: str | None = None  # PyTorch's message about a driver that it cannot use

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def bf16(self) -> bool:
        """Returns whether training uses bf16 by default."""
        return Settings(device=str(self.device)).uses_bf16


# --- numbers ------------------------------------------------------------------------------------------------------


def check_numbers(machine: Machine) -> Iterator[Check]:
    """Compares results of the device with float64 on the CPU, and reports which kernels it uses."""
    with warnings.catch_warnings(), seeded("doctor"):
        warnings.simplefilter("ignore")  # torch warns at length about kernels that are not used
        for dtype in DTYPES:
            yield _check_product(machine, dtype)
        yield from _check_attention(machine)
        for dtype in (torch.float32, torch.bfloat16):
            yield _check_network(machine, dtype)


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.detach().cpu().double() - reference).norm() / reference.norm())


def _compared(name: str, what: str, error: float, dtype: torch.dtype) -> Check:
    tolerance = TOLERANCE[dtype]
    values: Values = {"error": error if math.isfinite(error) else "not finite", "tolerance": tolerance}
    if error <= tolerance:  # False for NaN
        return Check("numbers", name, "ok", f"{what}: correct (error {error:.0e})", values)
    fault = f"wrong (error {error:.0e}; rounding makes at most {tolerance:.0e})"
    return Check("numbers", name, "fail", f"{what}: {fault}: {UNTRUSTED}", values)


def _check_product(machine: Machine, dtype: torch.dtype) -> Check:
    name = f"{DTYPES[dtype]} matrix products"
    a, b = (torch.randn(256, 256).to(dtype) for _ in range(2))
    try:
        result = a.to(machine.device) @ b.to(machine.device)
    except RuntimeError as error:
        if dtype is torch.float32:
            text = f"{name}: do not work ({reason(error)}): nothing can be computed on {machine.device}, update PyTorch"
            return Check("numbers", name, "fail", text)
        advice = "train with --precision fp32" if dtype is torch.bfloat16 else "Atoll does not need them"
        return Check("numbers", name, "warn", f"{name}: not supported here ({reason(error)}): {advice}")
    check = _compared(name, name, relative_error(result, a.double() @ b.double()), dtype)
    if dtype is torch.bfloat16 and machine.on_gpu and check.verdict == "ok" and not machine.bf16:
        return replace(check, verdict="note", text=f"{name}: emulated, so slow; training uses float32 here")
    return check


def _check_attention(machine: Machine) -> Iterator[Check]:
    """Checks both attentions of a DiT at the size of xl/2, and reports the kernels they use."""
    dtype = torch.bfloat16 if machine.bf16 else torch.float32
    for name, length in (("self-attention", NUM_TOKENS), ("attention to text", NUM_TEXT)):
        shapes = [(2, num, HEADS, HEAD_WIDTH) for num in (NUM_TOKENS, length, length)]
        q, k, v = (torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)  # [B, H, N, d/H], not contiguous
        mask = None
        if length == NUM_TEXT:
            mask = (torch.arange(length) < torch.tensor([[length], [length // 2]]))[:, None, None]  # [B, 1, 1, L]
        expected = attend(q.double(), k.double(), v.double(), mask)
        q, k, v = (part.to(machine.device).requires_grad_() for part in (q, k, v))
        their_mask = None if mask is None else mask.to(machine.device)
        used = KERNELS.get(SDPBackend(torch._fused_sdp_choice(q, k, v, their_mask)), "another")
        what = f"{name} in {DTYPES[dtype]}: the {used} kernel is used"
        check = _compared(name, what, relative_error(attend(q, k, v, their_mask), expected), dtype)
        check.values.update(kernel=used, dtype=DTYPES[dtype])
        if check.verdict == "ok" and machine.on_gpu and used == KERNELS[SDPBackend.MATH]:
            advice = "slow, and takes much memory: update PyTorch, or use a GPU of compute capability 8.0 or more"
            check = replace(check, verdict="warn", text=f"{what}, which is {advice}")
        yield check


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _check_network(machine: Machine, dtype: torch.dtype) -> Check:
    name = f"DiT in {DTYPES[dtype]}"
    config = DiTConfig(**preset("128x2/2", input_size=16, text_dim=32))
    network = DiT(config)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.1)  # the output of a newly initialised network is zero
    inputs = torch.randn(4, 4, 16, 16), torch.rand(4), torch.randn(4, 8, 32)
    expected = run_network(deepcopy(network).double(), tuple(x.double() for x in inputs), torch.device("cpu"))
    try:
        results = run_network(network, inputs, machine.device, bf16=dtype is torch.bfloat16)
    except RuntimeError as error:
        verdict: Verdict = "fail" if dtype is torch.float32 else "warn"
        advice = "nothing can be trained on it" if dtype is torch.float32 else "train with --precision fp32"
        return Check("numbers", name, verdict, f"{name}: does not run on {machine.device} ({reason(error)}): {advice}")
    errors = [relative_error(*pair) for pair in zip(results, expected, strict=True)]
    worst = float(torch.tensor(errors).max())  # unlike Python's max, propagates NaN
    return _compared(name, f"{name}, forward and backward", worst, dtype)


def run_network(network: DiT, inputs: Tensors, device: torch.device, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Returns a network's output, and the gradient of its mean square with respect to all weights."""
    network = network.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        output = network(*(x.to(device) for x in inputs))
    output.square().mean().backward()
    return output.detach(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


# --- speed and memory ---------------------------------------------------------------------------------------------


def check_compile(machine: Machine) -> Iterator[Check]:
    if machine.quick:
        return
    try:
        yield from in_children(try_compile, machine, limit=COMPILE_LIMIT)
    except RuntimeError as error:
        text = f"torch.compile: does not work here ({error}): train without --compile, which is the default"
        yield Check("speed", "torch.compile", "note", text, {"works": False})


class NoiseTask:
    """The part of a task that a `Learner` needs: an expert's loss, on random data."""

    def __init__(self, config: DiTConfig, num: int, device: torch.device) -> None:
        self.network, self.objective = DiT(config), get_objective("fm")
        shape = (num, config.in_channels, config.input_size, config.input_size)
        unused = torch.zeros(num)  # tokens and labels
        self.host = Batch(torch.randn(shape).half(), unused, torch.rand(num), torch.randn(shape), unused)
        self.batch = Batch(*(tensor.to(device) for tensor in self.host))
        self.text = torch.randn(num, NUM_TEXT, config.text_dim or 0).to(device)

    def loss(self, network: nn.Module, batch: Batch, host: Batch) -> Tensor:
        return self.objective.loss(lambda x, t: network(x, t, self.text), batch.latents.float(), batch.eps, batch.t)


def benchmark(machine: Machine, _rank: int = 0) -> Iterator[Check]:
    """Trains and samples as a run does, and compares time and memory with the predictions."""
    device, bf16, budget = machine.device, machine.bf16, 1.0 if machine.quick else 4.0
    model, batch = _benchmarked(machine)
    config, settings = DiTConfig(**preset(model)), Settings(model=model, batch=batch, device=str(device))
    free = available(device)
    predicted = predict(config, settings, text_length=NUM_TEXT, device_type=device.type, bf16=bf16)

    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    task = NoiseTask(config, batch, device)
    learner = Learner(task, settings, Distributed(settings))  # type: ignore[arg-type]

    def step() -> None:
        learner.backward(task.batch, task.host)
        learner.update(1e-4, 0.9)

    training = seconds_of(step, device, budget)
    allocated = torch.cuda.max_memory_allocated(device) if machine.on_gpu else peak_resident()

    network = task.network.eval().requires_grad_(False).to(torch.bfloat16 if bf16 else torch.float32)
    ensemble = Ensemble([VelocityExpert.of(Expert(network, task.objective))])
    num, steps = batch // 4, 2 if machine.quick else 5
    texts = torch.randn(num + 1, NUM_TEXT, config.text_dim or 0).split(1)  # one per image, and the null text
    prompts = Prompts(texts, tuple(range(num)), (num,) * num)
    sampling = seconds_of(
        lambda: generate(ensemble, prompts, range(num), guidance=2.0, times=uniform_times(steps)), device, budget
    )
    sampling *= STEPS / steps

    peak = measure_peak(machine, budget / 4)
    yield from _check_peak(machine, peak)
    work = training_work(config, batch, text_length=NUM_TEXT, bf16=bf16)
    what = f"training {model}, batch {batch}: {_in_seconds(training)} per step, {batch / training:,.0f} samples/s"
    yield _against_best(machine, "training", what, training, work.seconds(peak))
    share = work.seconds(peak) / training
    work = sampling_work(config, 2 * num, text_length=NUM_TEXT, bf16=bf16)
    what = f"sampling {model}, {STEPS} steps with guidance: {_in_seconds(sampling / num)} per image"
    yield _against_best(machine, "sampling", what, sampling, STEPS * work.seconds(peak))
    if not machine.quick:
        work = training_work(PAPERS, 16, text_length=NUM_TEXT, bf16=bf16, checkpointing=True)
        rate = 16 * share / work.seconds(peak)
        what = f"training xl/2, the papers' expert, with --checkpointing: {rate:,.2g} samples/s at the same share"
        yield Check("speed", "xl/2", "ok", f"{what} (predicted)", {"samples_per_second": rate})

    # CUDA's counter sees only tensors, so leave the prediction's base and holes out.
    expected = predicted.total - (predicted.base + predicted.holes if machine.on_gpu else 0)
    text = f"training {model}, batch {batch}: {in_words(allocated)} at the peak, {in_words(expected)} predicted"
    fits = allocated <= FAIR_MEMORY * expected
    if not fits:
        text += "; runs may need more than --dry-run says: begin with a smaller --micro-batch"
    values: Values = {"measured": allocated, "predicted": expected}
    yield Check("memory", "training", "ok" if fits else "warn", text, values)
    if not machine.quick:
        yield _check_room(machine, free)


def _check_room(machine: Machine, free: int) -> Check:
    """Checks whether the papers' expert fits in memory."""
    settings = Settings(model="xl/2", batch=1, checkpointing=True)
    needed = predict(
        PAPERS, settings, text_length=NUM_TEXT, device_type=machine.device.type, bf16=machine.bf16, base=CUDA_BASE
    ).total
    text = f"training xl/2 takes {in_words(needed)} or more (predicted); {in_words(free)} are free"
    if needed > free:
        text += ": train a smaller model, such as b/2, or free some"
    return Check("memory", "xl/2", "note" if needed > free else "ok", text, {"needed": needed, "free": free})


def _benchmarked(machine: Machine) -> tuple[str, int]:
    """Returns the model and batch to benchmark: large enough to keep the device busy, and certain to fit."""
    if not machine.on_gpu:
        return "mini", 8 if machine.quick else 16
    return ("b/2", 32) if not machine.quick and available(machine.device) > 16e9 else ("s/2", 16)


def seconds_of(call: Callable[[], object], device: torch.device, budget: float) -> float:
    """Returns the median time of at least three calls, within about `budget` seconds, after a warm-up call."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 4 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure_peak(machine: Machine, budget: float) -> Device:
    """Measures the peak FLOPS and bandwidth of the device with a large matrix product and a large copy."""
    dtype = torch.bfloat16 if machine.bf16 else torch.float32
    side, size = PEAK_SIZES[machine.device.type]
    a = torch.randn(side, side).to(machine.device, dtype)
    flops = 2 * side**3 / seconds_of(lambda: a @ a, machine.device, budget)
    source = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    target = torch.ones_like(source)
    bandwidth = 2 * size / seconds_of(lambda: target.copy_(source), machine.device, budget)
    device = Device("this machine", flops, bandwidth, available(machine.device))
    return device if machine.on_gpu else replace(device, launch=0)


def _check_peak(machine: Machine, peak: Device) -> Iterator[Check]:
    flops = f"{peak.flops / 1e12:.3g} TFLOPS" if peak.flops >= 1e12 else f"{peak.flops / 1e9:.0f} GFLOPS"
    product, copy = f"large matrix products: {flops}", f"copies within memory: {peak.bandwidth / 1e9:.0f} GB/s"
    values, copy_values = Values(flops=peak.flops), Values(bandwidth=peak.bandwidth)
    verdict: Verdict = "ok"
    name = torch.cuda.get_device_name(machine.device) if machine.on_gpu else ""
    known = next((device for key, device in DEVICES.items() if key in name), None)
    if known is not None:
        if machine.bf16:
            share = values["share_of_published"] = peak.flops / known.flops
            product += f", {share:.0%} of the published peak of the {known.name}"
            if share < FAIR_PEAK:
                verdict, product = "warn", f"{product}; {SLOW}"
        copy += f", {peak.bandwidth / known.bandwidth:.0%} of what is published"
        copy_values["share_of_published"] = peak.bandwidth / known.bandwidth
    yield Check("speed", "products", verdict, product, values)
    yield Check("speed", "memory", "ok", copy, copy_values)
    if machine.on_gpu:
        source = torch.zeros(SENT, dtype=torch.uint8).pin_memory()
        target = torch.zeros(SENT, dtype=torch.uint8, device=machine.device)
        copied = seconds_of(lambda: target.copy_(source, non_blocking=True), machine.device, 0.5)
        speed = len(source) / copied
        text = f"copies to the GPU: {speed / 1e9:.1f} GB/s"
        if speed < SLOW_BUS:
            text += "; a slot with 8 PCIe lanes or more has several times that"
        yield Check("speed", "copies to the GPU", "warn" if speed < SLOW_BUS else "ok", text, {"bandwidth": speed})


def _against_best(machine: Machine, name: str, text: str, seconds: float, best: float) -> Check:
    share = best / seconds
    slow = machine.on_gpu and share < FAIR_SHARE  # CPUs fall below it for many reasons that are no fault
    text = f"{text}; {share:.0%} of the best possible here{f'; {SLOW}' if slow else ''}"
    values: Values = {"seconds": seconds, "predicted": best, "share": share}
    return Check("speed", name, "warn" if slow else "ok", text, values)


def _in_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def try_compile(machine: Machine, _rank: int = 0) -> Iterator[Check]:
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # daemonic processes may not have children
    config = DiTConfig(**preset("64x1/2", input_size=8, text_dim=None))
    block = DiT(config).blocks[0].to(machine.device)
    h, time_of = torch.randn(2, 16, 64, device=machine.device), torch.randn(2, 6, 64, device=machine.device)
    expected, start = block(h, time_of, None), time.perf_counter()
    result = torch.compile(block, fullgraph=True)(h, time_of, None)
    seconds, error = time.perf_counter() - start, relative_error(result, expected.detach().cpu().double())
    if error > TOLERANCE[torch.float32]:
        text = f"torch.compile: its results are wrong, by {error:.1g}: train without --compile, which is the default"
        yield Check("speed", "torch.compile", "warn", text, {"works": False, "error": error})
        return
    pays = "--compile pays here" if machine.on_gpu else "--compile pays on GPUs, hardly on CPUs"
    text = f"torch.compile: works ({seconds:.0f} s for one small block); {pays}"
    yield Check("speed", "torch.compile", "ok", text, {"works": True, "seconds": seconds})


# --- several devices ----------------------------------------------------------------------------------------------


def check_all_reduce(machine: Machine) -> Iterator[Check]:
    num = torch.cuda.device_count() if machine.on_gpu else 0
    backend, size = ("nccl", num) if num > 1 else ("gloo", 2)
    try:
        with tempfile.TemporaryDirectory(prefix="atoll-doctor-") as folder:
            yield from in_children(all_reduce, f"{folder}/store", backend, size, num=size, limit=REDUCE_LIMIT)
    except RuntimeError as error:
        verdict: Verdict = "fail" if num > 1 else "warn"
        advice = "train in one process, which needs none"
        if num > 1:
            advice = "train on one GPU, or set NCCL_P2P_DISABLE=1 and try again"
        text = f"all-reduce by {backend} between {size} processes: does not work ({error}): {advice}"
        yield Check("several devices", "all-reduce", verdict, text)


def all_reduce(store: str, backend: str, size: int, rank: int) -> Iterator[Check]:
    """Checks and times a sum of gradients over processes, as in training on several devices."""
    limit = timedelta(seconds=REDUCE_LIMIT)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, f"file://{store}", world_size=size, rank=rank, timeout=limit)
    numbers = (1 << 26) if backend == "nccl" else (1 << 22)
    gradients = torch.full((numbers,), float(rank + 1), device=device)
    distributed.all_reduce(gradients)
    right = bool((gradients == size * (size + 1) / 2).all())
    seconds = seconds_of(lambda: distributed.all_reduce(gradients), device, 0)  # 0: equally many calls per process
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        speed = 2 * (size - 1) / size * 4 * numbers / seconds
        what = f"all-reduce by {backend} between {size} {'GPUs' if backend == 'nccl' else 'processes on the CPU'}"
        result = f"correct, {speed / 1e9:.1f} GB/s; they can train together"
        if not right:
            result = "the sums are wrong: train on one GPU, and test each by --device cuda:N"
        values: Values = {"backend": backend, "size": size, "bandwidth": speed, "right": right}
        yield Check("several devices", "all-reduce", "ok" if right else "fail", f"{what}: {result}", values)
