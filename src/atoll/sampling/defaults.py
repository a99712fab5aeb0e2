"""How pictures are made unless one says otherwise. Apart, so that `atoll sample --help` need not wait for torch.

benchmarks/quality.py is what they were chosen by.
"""

SOLVER = "multistep"
STEPS = 20
GUIDANCE = 2.0
ROUTING = "top1"
TOP_K = 2
BATCH = 16
