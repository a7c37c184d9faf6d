"""Train GPT-2 on SQuAD.

    python gpt2/train.py --dataset sample --max-steps 100                       # one process
    torchrun --standalone --nproc_per_node 2 gpt2/train.py --num-gpus 2 …       # two GPUs or CPU processes
    torchrun --nnodes 2 --node_rank 0 --master_addr HOST --master_port 6787 \\
             --nproc_per_node 8 gpt2/train.py …                                 # on each node, with its rank
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# Until the run handles signals: Ctrl-C during the imports must not print a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt2.config import GPT2TrainConfig  # noqa: E402
from utils.training.config import parse_config  # noqa: E402

if __name__ == "__main__":
    config = parse_config(GPT2TrainConfig, __doc__)

    # Only now: transformers takes seconds to import, and bad flags must fail fast.
    from gpt2.model import GPT2
    from utils.training.trainer import train

    train(config, GPT2)
