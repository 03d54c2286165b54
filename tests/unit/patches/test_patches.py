"""The table of patches is the contract with SGLang: what breaks a row ends start-up by the row's name."""

from __future__ import annotations

import ast
import json
import logging
import pkgutil
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang import cli, hooks
from dflash_sglang.patches import apply, contract, source, table
from dflash_sglang.patches.table import PATCHES, Patch
from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.sglang_names import probe
from dflash_sglang.sglang_names.probe import SGLangMismatchError

TESTS = Path(__file__).parents[2]
OF_0_5_22 = TESTS / "support" / "sglang_0.5.22.json"
HOOKS = [patch for patch in PATCHES if patch.kind == "hook around"]
REPLACED = [patch for patch in PATCHES if patch.kind == "replaced attribute"]


def ask_each(patches: Iterable[Patch], ask: Callable[[Patch, pytest.MonkeyPatch], None]) -> None:
    """Fails with the names of all rows of which it does not hold."""
    wrong = {}
    for patch in patches:
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                ask(patch, monkeypatch)
            except (AssertionError, pytest.fail.Exception) as error:
                wrong[patch.name] = str(error)
    assert not wrong


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """The contract is checked anew in every test."""
    contract.check.cache_clear()
    yield
    contract.check.cache_clear()


def copied(patch: Patch, folder: Path) -> tuple[Path, list[str]]:
    """A `sglang` package of the one file that a row relies on, and the names inside of the file."""
    names = patch.source.split(".")[1:]
    depth = next(
        i for i in range(len(names), 0, -1) if source.installed().joinpath(*names[:i]).with_suffix(".py").exists()
    )
    path = Path(*names[:depth]).with_suffix(".py")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source.installed() / path, folder / path)
    return folder / path, names[depth:]


def node_of(path: Path, names: Sequence[str]) -> Any:
    """The one definition of these names, each inside of the one before."""
    scope: Any = ast.parse(path.read_bytes())
    for name in names:
        (scope,) = (node for node in scope.body if getattr(node, "name", None) == name)
    return scope


def refused() -> dict[str, str]:
    """What is said of each row that ends start-up."""
    contract.check.cache_clear()
    with pytest.raises(SGLangMismatchError) as error:
        contract.check()
    return dict(re.findall(r"^  ([a-z0-9-]+): sglang\.\S+: (.*)$", str(error.value), re.MULTILINE))


# ---- The table ---------------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_and_fits_the_installed_sglang() -> None:
    assert len(table.BY_NAME) == len(PATCHES)
    assert set(contract.states().values()) == {contract.MATCHES}
    assert list(contract.check()) == []


def test_a_row_names_the_function_of_ours_that_acts_and_what_it_is_kept_for() -> None:
    """A gain, or the test of a fault."""

    def names(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
        assert callable(pkgutil.resolve_name(patch.by))
        assert bool(patch.gain) != bool(patch.test) and (TESTS / patch.test).exists()
        if patch.kind == "replaced attribute":
            module = Path(pkgutil.resolve_name(patch.by.rpartition(".")[0]).__file__).read_text()
            assert re.search(rf'replaced?\("{patch.name}", ', module), (
                "apply.replace is called with the row's name"
            )

    ask_each(PATCHES, names)


def test_a_row_is_for_the_process_that_runs_what_it_changes() -> None:
    """Arguments, HTTP and the tokenizer are the launcher's; requests, memory and models are the schedulers'."""
    of_launcher = ("arg_groups.", "entrypoints.", "managers.tokenizer_manager.")
    expected = {
        patch.name: "launcher" if patch.source.removeprefix("sglang.srt.").startswith(of_launcher) else "scheduler"
        for patch in PATCHES
        if patch.process != "every"
    }
    assert {patch.name: patch.process for patch in PATCHES if patch.process != "every"} == expected


def test_no_other_module_changes_sglang() -> None:
    """Hooks are registered and attributes replaced by `patches.apply`, and by the CPU platform."""
    package = Path(hooks.__file__).parent
    registering = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "HookRegistry" in path.read_text() and "platforms" not in path.parts
    }
    assert registering == {"patches/apply.py"}


# ---- Breakages ---------------------------------------------------------------------------------------------


def renamed(path: Path, names: list[str]) -> None:
    path.write_text(re.sub(rf"\b(def|class) {names[-1]}\b", r"\1 another_name", path.read_text()))


def with_another_line(path: Path, names: list[str]) -> None:
    last = node_of(path, names).body[-1]
    lines = path.read_text().splitlines(keepends=True)
    at = last.lineno - 1 - len(getattr(last, "decorator_list", ()))
    lines.insert(at, " " * last.col_offset + "changed = 1\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("change", "says", "rows"),
    [(renamed, "gone", PATCHES[::8]), (with_another_line, "source differs", PATCHES)],
    ids=["gone", "differs"],
)
def test_a_changed_function_ends_start_up_by_the_names_of_its_rows(
    change: Callable[[Path, list[str]], None], says: str, rows: Sequence[Patch], tmp_path: Path
) -> None:
    by_source = {patch.source: patch.fingerprint for patch in PATCHES}

    def ends(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / patch.name
        change(*copied(patch, folder))

        def read(dotted: str, root: Path | None) -> str | None:
            return source.fingerprint(dotted, folder) if dotted == patch.source else by_source[dotted]

        monkeypatch.setattr(contract, "fingerprint", read)
        assert refused() == {other.name: says for other in PATCHES if other.source == patch.source}

    ask_each(rows, ends)


def pass_on(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def alone(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry, which knows no hook, of a process that will ask for this row's alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    pkgutil.resolve_name(patch.target)  # an import may register hooks of the CPU platform
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(apply, "PATCHES", (patch,))
    monkeypatch.setattr(apply, "_wanted", [])
    return HookRegistry


def test_a_hook_without_a_target_or_that_sglang_did_not_apply_ends_start_up_by_the_rows_name() -> None:
    def fail(target: str, hooks: Any) -> None:
        raise TypeError("no hook on this")  # which SGLang logs, and no more

    def ends(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
        row = rf"\n  {patch.name}: {re.escape(patch.target)}: "
        another = replace(patch, by=f"{__name__}.pass_on")  # the row's own may act already, from another test
        monkeypatch.setattr(alone(another, monkeypatch), "_apply_target", fail)
        with pytest.raises(SGLangMismatchError, match=f"{row}.*not apply"):
            apply.apply(patch.process)
        monkeypatch.setattr(apply, "_resolved", lambda dotted: None)
        for start in (lambda: apply.register(patch.process), apply.verify):
            with pytest.raises(SGLangMismatchError, match=row):
                start()

    ask_each(HOOKS, ends)


def test_an_attribute_that_is_gone_or_keeps_its_value_ends_start_up_by_the_rows_name() -> None:
    def ends(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = rf"\n  {patch.name}: {re.escape(patch.target)}: SimpleNamespace has no attribute {patch.attribute}"
        with pytest.raises(SGLangMismatchError, match=gone):
            apply.replace(patch.name, SimpleNamespace(), object())
        discards = type("Discards", (), {patch.attribute: property(lambda self: None, lambda self, value: None)})
        with pytest.raises(SGLangMismatchError, match=rf"\n  {patch.name}: .*Discards does not take another"):
            apply.replace(patch.name, discards(), object())

    ask_each(REPLACED, ends)


def test_a_hook_that_acts_is_seen_behind_hooks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.plugins.hook_registry import HookType

    monkeypatch.setattr(FutureMap, "resolve_seq_lens_cpu", FutureMap.resolve_seq_lens_cpu)  # undone afterwards
    patch = table.BY_NAME["relay-lengths"]
    alone(patch, monkeypatch).register(patch.target, lambda result, *args, **kwargs: None, HookType.AFTER)
    apply.apply("scheduler")
    apply.verify()


def test_a_replaced_attribute_is_given_back() -> None:
    with pytest.raises(SGLangMismatchError), apply.replaced("attention-context", SimpleNamespace(), 12):
        pass
    config = SimpleNamespace(context_len=8)
    with pytest.raises(KeyError), apply.replaced("attention-context", config, 12):
        assert config.context_len == 12
        raise KeyError
    assert config.context_len == 8


def test_a_refused_sglang_ends_every_way_into_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the three may be the one that is lost: each of the others looks at the table."""
    monkeypatch.setattr(contract, "states", lambda: {patch.name: contract.GONE for patch in PATCHES})
    launch = SimpleNamespace(speculative_algorithm="DFLASH", enable_return_aux_hidden_states=False)
    monkeypatch.setattr(hooks, "_resolved", None)
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    for enter in (
        lambda: hooks.handle_speculative_decoding(lambda args: None, launch),
        lambda: hooks.create_worker(lambda *_: type, algorithm, launch),
        lambda: hooks.parse_config(lambda *_: None, None, "draft"),
    ):
        with pytest.raises(SGLangMismatchError, match=f"{len(PATCHES)} of {len(PATCHES)} patches"):
            enter()


# ---- What counts -------------------------------------------------------------------------------------------


BEFORE = '''
import a

class C(object):
    """Of C."""

    x = 1

    @property
    def f(self):
        """Of f."""
        return self.g(1, "one") if self.x else """
of a string
"""

    @f.setter
    def f(self, value):
        self.x = value

def f():
    return 2
'''
SAME = {
    "a comment": ("        self.x = value", "        # why\n# at the margin\n        self.x = value  # here"),
    "another docstring": ('"""Of f."""', '"""Of f, at\n    length."""'),
    "no docstring": ('        """Of f."""\n', ""),
    "layout": ('self.g(1, "one")', "self.g(\n            1,\n            'one',\n        )"),
    "what stands beside it": ("import a", "import b"),
    "another function of the name": ("    return 2", "    return 3"),
}
OTHER = {
    "a value": ("self.g(1,", "self.g(2,"),
    "a string": ("of a string", "of another string"),
    "a decorator": ("@f.setter", "@f.deleter"),
    "an argument": ("def f(self, value)", "def f(self, value, more=None)"),
}


def test_only_code_changes_a_hash(tmp_path: Path) -> None:
    def hashed(name: str, text: str) -> str | None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(text)
        return source.fingerprint("sglang.m.C.f", tmp_path / name)

    before = hashed("before", BEFORE)
    changed = {}
    for name, (old, new) in {**SAME, **OTHER}.items():
        assert old in BEFORE
        changed[name] = hashed(name, BEFORE.replace(old, new, 1))
    assert None not in (before, *changed.values())
    assert [name for name, found in changed.items() if found == before] == list(SAME)


# ---- Other versions of SGLang ------------------------------------------------------------------------------


def known_hashes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The installed SGLang seems to be 0.5.22."""
    hashes = json.loads(OF_0_5_22.read_text())["hashes"]
    by_source = {table.BY_NAME[name].source: found for name, found in hashes.items()}
    monkeypatch.setattr(contract, "fingerprint", lambda dotted, root: by_source[dotted])
    monkeypatch.setattr(probe.importlib.metadata, "version", lambda name: "0.5.22")
    return hashes


def test_sglang_0_5_22_is_refused_with_the_list_of_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = known_hashes(monkeypatch)
    assert hashes.keys() == table.BY_NAME.keys(), json.loads(OF_0_5_22.read_text())["made_by"]
    differing = {name: found for name, found in hashes.items() if found != table.BY_NAME[name].fingerprint}
    assert 0 < len(differing) < len(PATCHES)
    assert refused() == {name: "source differs" if found else "gone" for name, found in differing.items()}
    with pytest.raises(SGLangMismatchError) as error:
        contract.check()
    assert f"does not fit sglang 0.5.22: {len(differing)} of {len(PATCHES)} patches" in str(error.value)
    assert "Install sglang==0.5.23, or a dflash-sglang made for sglang 0.5.22." in str(error.value)
    assert "accept_patches" in str(error.value)


# ---- accept_patches ----------------------------------------------------------------------------------------


def test_named_rows_are_taken_on_trust_each_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = known_hashes(monkeypatch)
    there = {table.BY_NAME[name].source: found or "another" for name, found in hashes.items()}  # nothing is gone
    monkeypatch.setattr(contract, "fingerprint", lambda dotted, root: there[dotted])
    differing = tuple(refused())
    *warnings, served = contract.check(differing)
    assert [line.split(":")[1].strip() for _, line in warnings] == list(differing)
    assert {level for level, _ in warnings} == {logging.WARNING}
    assert all("applied on trust" in line for _, line in warnings) and "sglang 0.5.22" in served[1]
    with pytest.raises(SGLangMismatchError) as error:
        contract.check(differing[1:])
    assert re.findall(r"^  ([a-z0-9-]+): ", str(error.value), re.MULTILINE) == [differing[0]]


def test_rows_that_are_gone_or_do_not_exist_are_not_taken_on_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "fingerprint", lambda dotted, root: None)
    with pytest.raises(SGLangMismatchError, match="\n  worker: .*: gone"):
        contract.check(tuple(table.BY_NAME))
    with pytest.raises(PluginConfigError, match="accept_patches: unknown patch 'wroker'. Known patches: worker, "):
        contract.check(("worker", "wroker"))


def test_the_setting_is_a_list_of_names() -> None:
    assert PluginConfig.from_mapping({"accept_patches": ["worker"]}).accept_patches == ("worker",)
    for value in ("worker", [1], None, {"worker": True}):
        with pytest.raises(PluginConfigError, match="accept_patches=.*: expected a list of names"):
            PluginConfig.from_mapping({"accept_patches": value})


# ---- The command -------------------------------------------------------------------------------------------


def test_the_command_prints_every_row_and_whether_it_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["patches"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{patch.name} +matches .*{patch.target}$", printed, re.MULTILINE) for patch in PATCHES)
    assert all(patch.why in printed and patch.worth in printed and patch.by in printed for patch in PATCHES)
    assert printed.splitlines()[-1] == f"{len(PATCHES)} patches, {len(PATCHES)} of them fit"
    assert cli.main(["patches", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {patch.name: patch.fingerprint for patch in PATCHES}
    (tmp_path / "srt").mkdir()
    assert cli.main(["patches", "--sglang", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"{len(PATCHES)} patches, 0 of them fit"
    assert f"{len(PATCHES)} of {len(PATCHES)} patches do not fit: worker, " in printed.err
    assert cli.main(["patches", "--sglang", str(tmp_path / "srt")]) == 2
