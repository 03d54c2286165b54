"""The parallel layouts that are measured and soaked, with the flags of each process."""

from __future__ import annotations

from dataclasses import dataclass

PORTS_PER_SERVER = 50  # from one server's port to the next one's; data-parallel attention adds 233 and up to 8
PORTS_PER_LAYOUT = 600  # of a layout's servers
DATA_PARALLEL_ATTENTION = ("--enable-dp-attention", "--enable-dp-lm-head")


@dataclass(frozen=True)
class Layout:
    """How a model lies on GPUs.

    flags: of every process, beside model and ports. replicas: data-parallel ranks that a request can be routed
    to. nodes: processes of `launch_server`, each on its share of the GPUs. pair: "trained", the package's own, or
    a shape of `dflash_sglang.bench.random_pair`.
    """

    name: str
    title: str
    gpus: int
    flags: tuple[str, ...]
    replicas: int = 1
    nodes: int = 1
    pair: str = "trained"

    @property
    def independent_replicas(self) -> bool:
        """Whether the replicas share no collective; each then opens a port of its own choice for its group."""
        return self.replicas > 1 and "--enable-dp-attention" not in self.flags

    def flags_of(self, node: int, port: int) -> list[str]:
        """The flags of one of the `nodes` processes, beside the model. Requests go to `port`, the first one's."""
        flags, rendezvous = list(self.flags), str(port + 20)
        if self.nodes > 1:
            flags += ["--nnodes", str(self.nodes), "--node-rank", str(node)]
            flags += ["--dist-init-addr", f"127.0.0.1:{rendezvous}"]
            flags += ["--base-gpu-id", str(node * self.gpus // self.nodes)]
        elif not self.independent_replicas:
            flags += ["--nccl-port", rendezvous]
        return flags


def _sizes(tp: int, dp: int = 1) -> tuple[str, ...]:
    return ("--tp-size", str(tp), *(("--dp-size", str(dp)) if dp > 1 else ()))


def _attention(
    name: str, title: str, tp: int, dp: int, flags: tuple[str, ...] = DATA_PARALLEL_ATTENTION, **more: str
) -> Layout:
    """Data-parallel attention, whose ranks together take the requests."""
    whole = f"data-parallel attention, {title}"
    return Layout(name, whole, gpus=tp, flags=_sizes(tp, dp) + flags, replicas=dp, **more)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("tp2", "tensor parallel over 2 GPUs", 2, _sizes(2)),
        Layout("tp4", "tensor parallel over 4 GPUs", 4, _sizes(4)),
        Layout("dp2", "2 data-parallel replicas", 2, _sizes(1, 2), replicas=2),
        _attention("dpa2", "2 ranks", 2, 2),
        _attention("dpa2_moe", "2 ranks, random Qwen3-MoE target", 2, 2, pair="small-moe"),
        _attention("dpa2_recurrent", "2 ranks, recurrent target", 2, 2, pair="small-hybrid"),
        _attention("dpa2_no_dp_lm_head", "2 ranks, head over all of them", 2, 2, DATA_PARALLEL_ATTENTION[:1]),
        _attention("dpa4", "4 ranks", 4, 4),
        _attention("dpa2_tp4", "2 ranks of 2 tensor-parallel GPUs", 4, 2),
        Layout("nnodes2", "tensor parallel over 2 nodes of one GPU each", 2, _sizes(2), nodes=2),
    )
}
