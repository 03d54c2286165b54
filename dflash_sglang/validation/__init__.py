"""Start-up validation: facts of a launch in, problems out. Pure; `startup.py` gathers the facts."""

from dflash_sglang.validation.facts import (
    GPU_DRAFT_BACKENDS,
    ParallelFacts,
    Problem,
    ServingFacts,
    StartupError,
    TargetFacts,
)
from dflash_sglang.validation.fit import config_problem, draft_problems, serving_problems
from dflash_sglang.validation.kv import kv_problems, pool_problems, window_problems
from dflash_sglang.validation.launches import COORDINATION, UNSERVED, launch_problems, reported_rows_problems
from dflash_sglang.validation.own_modules import own_problems, unread_problems
from dflash_sglang.validation.quantisation import MODELOPT, quantisation_problems
from dflash_sglang.validation.token_map import token_map_problems
from dflash_sglang.validation.weights import weights_problems

__all__ = [
    "COORDINATION",
    "GPU_DRAFT_BACKENDS",
    "MODELOPT",
    "UNSERVED",
    "ParallelFacts",
    "Problem",
    "ServingFacts",
    "StartupError",
    "TargetFacts",
    "config_problem",
    "draft_problems",
    "kv_problems",
    "launch_problems",
    "own_problems",
    "pool_problems",
    "quantisation_problems",
    "reported_rows_problems",
    "serving_problems",
    "token_map_problems",
    "unread_problems",
    "weights_problems",
    "window_problems",
]
