"""Updates of weights through SGLang's updaters, of target and draft, without a server (C22)."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from torch import Tensor, nn

from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.patches import weight_updates
from dflash_sglang.patches.weight_updates import select_runners
from tests.engine.test_formats import Target, loaded
from tests.support import quantised_drafts as drafts
from tests.support import quantised_twins
from tests.support import sglang_layers as layers
from tests.support.draft_formats import FORMATS, KEPT
from tests.support.tiny import draft_config, draft_tensors

pytestmark = layers.cpu_only
WAYS = ("tensor", "distributed")
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        quantised_twins.install(patch)
        # For the whole process, and for tensors of GPUs alone.
        patch.setattr(f"{UPDATER}.monkey_patch_torch_reductions", lambda: None)
        hooked = functools.partial(select_runners, SchedulerWeightUpdaterManager._select_runners)
        patch.setattr(
            SchedulerWeightUpdaterManager, "_select_runners", lambda *args, **named: hooked(*args, **named)
        )
        yield


class Head(nn.Module):
    """A target that is its head; loads by name what it is given, as a target of SGLang does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "weight":
                self.weight.copy_(tensor)


def sglang_updater(model: Any) -> Any:
    """SGLang's own, of a runner with this model."""
    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: pytest.fail("graphs are captured anew"),
        get_model_runner=lambda: None,
    )


class Server:
    """SGLang's manager of updates over runners with the updaters that a worker installs."""

    def __init__(self, draft: Any, refresh_head: bool = True) -> None:
        self.head, self.draft = Head(), draft
        self.copy = self.head.weight.clone()
        self.refreshed: list[str] = []
        target, of_draft = (
            SimpleNamespace(
                weight_updater=sglang_updater(model),
                model=model,
                decode_cuda_graph_runner=object.__new__(weight_updates.DecodeCudaGraphRunner),
            )
            for model in (self.head, draft)
        )

        def refresh() -> None:
            self.copy.copy_(self.head.weight)
            self.refreshed.append("head")

        weight_updates.install(
            target, of_draft, lambda: self.refreshed.append("kv"), refresh if refresh_head else None
        )
        self.target_updater, self.draft_updater = target.weight_updater, of_draft.weight_updater
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(
                model_runner=target,
                weight_update_runners=lambda: [("target", target)],
                deserialize_own_rank=lambda tensors: tensors,
            ),
            draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", of_draft)]),
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )

    def begin(self, selector: str) -> None:
        assert self.manager.begin_weight_update(SimpleNamespace(selector=selector)).success

    def end(self) -> None:
        assert self.manager.end_weight_update(SimpleNamespace()).success

    def send(
        self, way: str, tensors: dict[str, Tensor], selector: str = "all", load_format: str | None = None
    ) -> tuple[bool, str]:
        named = list(tensors.items())
        common = dict(load_format=load_format, selector=selector, flush_cache=False, weight_version=None)
        if way == "tensor":
            answer = self.manager.update_weights_from_tensor(
                SimpleNamespace(serialized_named_tensors=named, **common)
            )
        else:
            with pytest.MonkeyPatch.context() as patch:
                sglangs = type(self.target_updater._updater)
                patch.setattr(sglangs, "receive_weights_from_distributed", lambda *_, **__: named)
                answer = self.manager.update_weights_from_distributed(
                    SimpleNamespace(names=[], dtypes=[], shapes=[], group_name="group", **common)
                )
        return answer.success, answer.message


def state(model: Any) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dense(directory: Path) -> Any:
    return layers.make_draft(directory)


def in_fp8(directory: Path) -> Any:
    config = draft_config(**drafts.SHAPE)
    return drafts.build(directory, {}, draft_tensors(config))


def new_weights(make: Any) -> dict[str, Tensor]:
    """Other tensors for the draft that `make` makes, by the names of its checkpoint."""
    shape = drafts.SHAPE if make is in_fp8 else {}
    return {name: tensor + 1 for name, tensor in draft_tensors(draft_config(**shape)).items()}


def named_as_by_target(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("way", "begun"), [("tensor", "all"), ("distributed", "target")])
@pytest.mark.parametrize("make", [dense, in_fp8])
def test_tensors_for_both_are_the_targets_unless_they_have_the_drafts_names(tmp_path, make, way, begun):
    """As an Engine sends them, which names no selector: layers of a target have the draft's shapes, too."""
    server, new = Server(make(tmp_path)), new_weights(make)
    before = state(server.draft)
    of_target = named_as_by_target(new) | {"weight": torch.ones(4)}
    server.begin(begun)
    success, message = server.send(way, of_target)
    assert success and message.endswith("the draft keeps its own.") and same(state(server.draft), before)
    assert server.send(way, new)[0]
    server.end()
    assert server.copy.tolist() == [1.0] * 4
    assert torch.equal(server.draft.norm.weight, new["norm.weight"]) and server.refreshed[-2:] == ["kv", "head"]
    server.begin("draft")
    assert server.send(way, named_as_by_target({"norm.weight": before["norm.weight"]}), "draft")[0]
    server.end()
    assert torch.equal(server.draft.norm.weight, before["norm.weight"])


def test_tensors_of_the_target_that_are_copied_by_name_leave_the_draft_as_it_was(tmp_path):
    """SGLang copies each into the parameter of its name, and ends with an error where there is none."""
    server = Server(dense(tmp_path))
    before = state(server.draft)
    server.begin("all")
    assert server.send("tensor", {"weight": torch.ones(4)}, load_format="direct")[0]
    server.end()
    assert server.copy.tolist() == [1.0] * 4 and same(state(server.draft), before)


def test_tensors_of_the_target_among_those_of_the_draft_are_refused_with_the_selector_to_send(tmp_path):
    of_target, head = "model.layers.0.mlp.down_proj.weight", {"weight": torch.ones(4)}
    mixed = {"norm.weight": torch.ones(64), of_target: torch.ones(64, 128)}
    for way in WAYS:
        server = Server(dense(tmp_path))
        before = state(server.draft)
        server.begin("all")
        for selector, tensors, unexpected in (("all", mixed, of_target), ("draft", mixed | head, "weight")):
            success, message = server.send(way, tensors, selector)
            assert not success and f"unexpected tensors ['{unexpected}']" in message
            assert "selector='target'" in message and "partially updated" not in message
            assert same(state(server.draft), before)
        assert server.send(way, head, "target")[0]
        server.end()
        assert same(state(server.draft), before) and server.copy.tolist() == [1.0] * 4


def test_a_quantised_draft_computes_between_the_requests_of_a_session(tmp_path):
    """As a prefill does that comes meanwhile: SGLang holds no request back until the session ends."""
    server, new = Server(in_fp8(tmp_path)), new_weights(in_fp8)
    rows = torch.randn(4, server.draft.fc.input_size).to(drafts.DTYPE)
    layers_of = {f"layers.{i}.": {n: t for n, t in new.items() if n.startswith(f"layers.{i}.")} for i in range(3)}

    def computed() -> list[Tensor]:
        features = server.draft.fc(rows)[0]
        return [features, *(layer.self_attn.qkv_proj(features)[0] for layer in server.draft.layers)]

    with torch.no_grad():
        before = computed()
        server.begin("draft")
        assert all(torch.equal(*pair) for pair in zip(computed(), before, strict=True))
        for sent, tensors in enumerate(layers_of.values()):
            assert server.send("tensor", tensors, "draft")[0]
            changed = [not torch.equal(*pair) for pair in zip(computed(), before, strict=True)]
            assert changed == [False, *(layer <= sent for layer in range(3))]
        server.end()


def test_a_copy_of_the_targets_head_follows_when_a_session_ends_and_at_once_in_one_of_the_draft(tmp_path):
    for way in WAYS:
        server = Server(dense(tmp_path))
        server.begin("target")
        for value in (1.0, 2.0):
            assert server.send(way, {"weight": torch.full((4,), value)}, "target")[0]
        assert server.refreshed == []
        server.end()
        assert server.refreshed == ["head"] and server.copy.tolist() == [2.0] * 4
        server.begin("draft")
        assert server.send(way, {"weight": torch.full((4,), 3.0)}, "target")[0]
        assert server.refreshed == ["head"] * 2 and server.copy.tolist() == [3.0] * 4
        server.end()
        assert server.refreshed == ["head"] * 2
    # Weights that were written past SGLang, by RDMA: a session in which nothing is sent.
    server.begin("target")
    server.head.weight.fill_(5.0)
    server.end()
    assert server.copy.tolist() == [5.0] * 4


class Updater:
    """SGLang's updater of the target as far as whole checkpoints go: each fills the head with ones."""

    def __init__(self, head: Head, moves: bool = False) -> None:
        self._head, self._moves, self.recaptured = head, moves, False

    def get_model(self) -> Head:
        return self._head

    def update_weights_from_disk(
        self, path: str, load_format: str, names: Any = None, recapture_cuda_graph: bool = False
    ) -> tuple[bool, str]:
        self.recaptured = recapture_cuda_graph
        return self.update_weights_from_ipc(None)

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        if self._moves:
            self._head.weight = nn.Parameter(torch.ones(4))
        self._head.weight.data.fill_(1.0)
        return True, "updated"


def test_a_whole_checkpoint_is_the_targets_and_keeps_the_graphs(tmp_path, caplog):
    """From disk, which says so where SGLang would capture anew, or by IPC."""
    for recapture in (False, True, None):
        server = Server(dense(tmp_path))
        server.target_updater._updater = inner = Updater(server.head)
        before, common = state(server.draft), dict(flush_cache=False, weight_version=None)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dflash_sglang"):
            if recapture is None:
                answer = server.manager.update_weights_from_ipc(SimpleNamespace(zmq_handles={}, **common))
                assert answer.message.endswith("the draft keeps its own.")
            else:
                of_disk = dict(model_path="other", load_format="auto", recapture_cuda_graph=recapture)
                answer = server.manager.update_weights_from_disk(SimpleNamespace(**of_disk, **common))
                assert "from other; the draft keeps its own." in caplog.text
        assert answer.success and not inner.recaptured and server.copy.tolist() == [1.0] * 4
        assert ("graphs are kept" in caplog.text) == bool(recapture) and same(state(server.draft), before)


def test_weights_that_move_fail_a_recapture_and_no_other_update(tmp_path):
    server = Server(dense(tmp_path))
    server.target_updater._updater = Updater(server.head, moves=True)
    success, message = server.target_updater.update_weights_from_disk("other", "auto", recapture_cuda_graph=True)
    assert not success and "but ['weight'] moved" in message and "with 'other'" in message
    assert server.target_updater.update_weights_from_disk("other", "auto") == (True, "updated")
    server.target_updater._captured = lambda: False  # nothing reads the old ones
    answer = server.target_updater.update_weights_from_disk("other", "auto", recapture_cuda_graph=True)
    assert answer == (True, "updated")
    server = Server(dense(tmp_path), refresh_head=False)  # no copy of the head
    server.target_updater._updater = inner = Updater(server.head)
    assert server.target_updater.update_weights_from_disk("other", "auto", None, True)[0] and not inner.recaptured


@pytest.mark.parametrize("name", ["speculators with a reduced vocabulary", "z-lab with mask_embedding.pt"])
def test_an_update_after_a_release_of_the_weights_makes_the_draft_what_it_was(tmp_path, name):
    """--enable-memory-saver gives memory that was taken while the draft was loaded back with other content."""
    from safetensors.torch import load_file

    directory, taken = FORMATS[name](tmp_path), []
    bind = DFlashDraftModel.bind_target

    def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken.extend((*self.parameters(), *self.buffers()))
        taken[:] = [tensor.detach() for tensor in taken]
        return bind(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashDraftModel, "bind_target", bound)
        model = loaded(directory, Target())
    positions, rows = torch.arange(20), torch.randn(20, 64)

    def outcome() -> list[Tensor]:
        hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
        keys = [layers.context_key_value(layer.self_attn, rows, positions)[0] for layer in model.layers]
        return [*keys, model.forward_embed(torch.tensor([3, 5])), model.head.likeliest(hidden, 1).ids[:, 0]]

    with torch.no_grad():
        before = outcome()
        for tensor in taken:
            tensor.zero_()
        model.load_weights(load_file(directory / "model.safetensors").items())
        for got, expected in zip(outcome(), before, strict=True):
            assert torch.equal(got, expected)
    if "reduced" in name:
        assert set(before[-1].tolist()) <= set(KEPT)
