"""bench/mtp_step.py: the target that it writes, and what it claims of two workers."""

from __future__ import annotations

import pytest

from bench.mtp_step import EAGLE, MTP_LAYERS, SHAPES, claims, config_of, parameters
from dflash_sglang.checkpoint.mtp import MtpSpec, holds_mtp
from dflash_sglang.demo.launch import OURS


@pytest.mark.parametrize("shape", SHAPES)
def test_the_target_has_layers_that_both_workers_serve(shape):
    config = config_of(shape)
    spec = MtpSpec.from_config(config)
    assert holds_mtp(config)
    assert (spec.num_layers, spec.num_target_layers) == (MTP_LAYERS, 45)
    assert {layer.kind for layer in spec.layers} == {"sliding_attention"}
    assert config["layer_types"][:45].count("full_attention") == 12


def test_both_servers_fit_a_gpu_of_139_gib():
    counts = parameters("flash")
    ours = counts["target"] + counts["MTP layers"]
    theirs = ours + counts["SGLang's worker besides"]
    assert 2 * (ours + theirs) < 0.6 * 139 * 2**30


@pytest.mark.parametrize(
    ("ours", "lengths", "failed"),
    [
        ({"greedy": 101.0, "sampled": 111.0}, {}, []),
        ({"greedy": 99.0, "sampled": 111.0}, {}, ["tokens/s"]),
        ({"greedy": 101.0, "sampled": 109.0}, {}, ["tokens/s"]),
        ({"greedy": 101.0, "sampled": 111.0}, {EAGLE: 2.9}, ["accept length of eagle"] * 2),
    ],
)
def test_claims_are_lost_by_fewer_tokens_and_by_other_accept_lengths(ours, lengths, failed):
    def figures(sampling):
        rates = {OURS: ours[sampling], EAGLE: 100.0}
        return {
            name: {"tokens_per_second": [rate, 0.0, 1000.0], "accept_length": [lengths.get(name, 3.0)] * 3}
            for name, rate in rates.items()
        }

    found = claims({"32": {sampling: figures(sampling) for sampling in ours}}, length=3)
    assert len(found) == 6
    lost = [one["what"] for one in found if not one["ok"]]
    assert [any(what.startswith(start) for what in lost) for start in failed] == [True] * len(failed)
    assert len(lost) == len(failed)
