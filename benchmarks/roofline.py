"""Prints the speed tables of docs/hardware.md, predicted from FLOPs and bytes; nothing is trained or measured.

python benchmarks/roofline.py
"""

from functools import cache, partial
from typing import Any

from atoll.networks.dit import DiTConfig
from atoll.networks.presets import preset
from atoll.training.memory import predict
from atoll.training.roofline import DEVICES, Device, Work, sampling_work, training_work
from atoll.training.settings import Settings

LENGTH = 77  # CLIP's
MODELS = {name: DiTConfig(**preset(name)) for name in ("b/2", "l/2", "xl/2")}
A40 = Device("A40", 149.7e12, 696e9, 48e9)  # HDDM's
DAY = 86_400

train, sample = (cache(partial(count, text_length=LENGTH)) for count in (training_work, sampling_work))


def main() -> None:
    names = " | ".join(DEVICES)
    print("One training step of 32 samples, ms: eager, and compiled\n")
    print(f"| model | checkpointing | TFLOPs | GB | GB compiled | {names} |\n|---|---|---|---|---|---|---|---|")
    for name, config in MODELS.items():
        for checkpointing in (False, True):
            settings = Settings(batch=32, checkpointing=checkpointing)
            memory = predict(config, settings, text_length=LENGTH, device_type="cuda", bf16=True).total
            both = [train(config, 32, checkpointing=checkpointing, compiled=compiled) for compiled in (False, True)]
            times = [in_ms(both, device) if memory <= device.memory else "does not fit" for device in DEVICES.values()]
            row(name, "yes" if checkpointing else "no", *sizes(both), *times)

    print("\nOne evaluation in sampling, ms: eager, and compiled\n")
    print(f"| model | samples | TFLOPs | GB | GB compiled | {names} |\n|---|---|---|---|---|---|---|---|")
    for name, config in MODELS.items():
        for samples in (2, 32):
            both = [sample(config, samples, compiled=compiled) for compiled in (False, True)]
            row(name, samples, *sizes(both), *(in_ms(both, device) for device in DEVICES.values()))

    print("\n8 experts of xl/2 for 400,000 steps with checkpointing, GPU-days: eager, and compiled\n")
    print(f"| batch of an expert | samples | {names} | A40 |\n|---|---|---|---|---|---|")
    for num in (1, 4):  # micro-batches of 32
        both = [
            train(MODELS["xl/2"], 32, checkpointing=True, micro_batches=num, compiled=compiled)
            for compiled in (False, True)
        ]
        devices = [*DEVICES.values(), A40]
        days = [" / ".join(f"{8 * 400_000 * work.seconds(d) / DAY:.1f}" for work in both) for d in devices]
        row(32 * num, f"{8 * 400_000 * 32 * num:.3g}", *days)
    work, a100 = train(MODELS["xl/2"], 32, checkpointing=True, micro_batches=4), DEVICES["A100"]
    print(f"\n72 days of an A100 are {72 * DAY / work.seconds(a100) * 128:.3g} samples, eager, batch 128")
    print(f"an A40 takes {work.seconds(A40) / work.seconds(a100):.2f} times as long as an A100; HDDM: {120 / 72:.2f}")
    monolith = train(MODELS["xl/2"], 32, checkpointing=True, micro_batches=8)
    share = monolith.seconds(a100) * 0.4 * a100.flops / monolith.flops
    print(f"40% of an A100's FLOPS are {share:.0%} of the bound's speed, eager, batch 256")

    print("\nDiT-XL/2 of batch 128 with checkpointing on an A100, seconds per step; fast-DiT measured 1 / 0.84\n")
    config = DiTConfig(**preset("xl/2", text_dim=None), adaln="block", out_channels=8)
    seconds = train(config, 128, checkpointing=True).seconds(a100)
    print(f"{seconds:.2f}: {seconds * 0.84:.0%} of the bound's speed")


def row(*cells: Any) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def sizes(both: list[Work]) -> list[str]:
    return [f"{both[0].flops / 1e12:.2f}", *(f"{work.bytes / 1e9:.1f}" for work in both)]


def in_ms(both: list[Work], device: Device) -> str:
    return " / ".join(f"{1e3 * work.seconds(device):.3g}" for work in both)


if __name__ == "__main__":
    main()
