"""Merging into oMLX's file and undoing it: nothing foreign is lost, nothing is half written."""

import copy
import errno
import json
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.omlx_tools import MODEL, settings

from mlx_dflash2.omlx import disable_settings, merge_settings, store
from mlx_dflash2.omlx.document import parse_document
from mlx_dflash2.omlx.fields import FIELDS
from mlx_dflash2.omlx.undo import load_record

EXISTING = """{
  "version": 1,
  "x_note": "kept \\u00e9 1.10 1e5",
  "models": {
    "gpt-oss": { "temperature": 0.70, "is_pinned": true, "some_future_key": [1, 2] },
    "%s": {
      "model_alias": "qwen",
      "top_p": 9.5E-1,
      "mtp_enabled": true
    },
    "mlx-community--Other": {"ttl_seconds": 900}
  }
}""" % (MODEL)  # noqa: UP031


@pytest.fixture
def undo_dir(tmp_path):
    return tmp_path / "undo"


@pytest.fixture
def merge(tmp_path, undo_dir):
    """Merge the recommended settings into a file of the given text."""

    def run(text=None, write=True, **kwargs):
        path = tmp_path / "model_settings.json"
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        document = kwargs.pop("document", None) or settings()
        return merge_settings(path, document, write=write, undo_dir=undo_dir, **kwargs)

    return run


def test_new_file(merge, tmp_path, undo_dir):
    change = merge()
    assert json.loads(change.path.read_text()) == settings()
    assert change.path.read_text() == json.dumps(settings(), indent=2) + "\n"
    assert change.backup is None
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert json.loads(change.path.read_text()) == {"version": 1, "models": {}}


def test_plan_writes_nothing(merge, tmp_path):
    change = merge(write=False)
    assert '+      "dflash_enabled": true,' in change.diff
    assert os.listdir(tmp_path) == []


def test_foreign_bytes_stay(merge, undo_dir):
    change = merge(EXISTING, replace_mtp=True)
    text = change.path.read_text()
    data = json.loads(text)
    assert data["models"][MODEL].items() >= settings()["models"][MODEL].items()
    for line in EXISTING.splitlines():
        if "mtp_enabled" not in line:
            assert line.rstrip(",") in text
    assert change.backup.read_text() == EXISTING
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert change.path.read_text() == EXISTING


@pytest.mark.parametrize(
    "text",
    [
        '{"version":1,"models":{}}',
        '{"version": 1, "models": {"%s": {}}}' % MODEL,  # noqa: UP031
        '{"models":{"%s":{"top_k":1}},"version":1}' % MODEL,  # noqa: UP031
        '{\r\n\t"version": 1,\r\n\t"models": {\r\n\t\t"a": {"b": NaN}\r\n\t}\r\n}\r\n',
        '{"version": 1, "models": {"\\ud800": {"lone": "\\udfff", "big": 1e999}}}',
        ' {"version": 1, "models": {"a": {"x": {"models": {"y": 1}, "version": 7}}}} ',
    ],
    ids=["compact", "empty-entry", "other-order", "crlf-tabs", "surrogates", "nested"],
)
def test_layouts(merge, undo_dir, text):
    change = merge(text)
    raw = change.path.read_bytes()
    _, data = parse_document(raw)
    assert data["models"][MODEL].items() >= settings()["models"][MODEL].items()
    assert "\r\n" not in text or raw.count(b"\n") == raw.count(b"\r\n")
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert without_empty(json.loads(change.path.read_text())) == without_empty(json.loads(text))


def test_second_export_changes_nothing(merge, tmp_path, undo_dir):
    first = merge(EXISTING, replace_mtp=True)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    second = merge()
    assert second.empty and not second.written and second.diff == ""
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert first.path == second.path


def test_undo_spans_several_exports(merge, undo_dir):
    merge(EXISTING, replace_mtp=True)
    change = merge(document=settings(block_size=4, chip="M1"))
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert change.path.read_text() == EXISTING
    assert load_record(str(change.path), MODEL, undo_dir) == {}
    again = disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert again.empty


def test_undo_keeps_what_others_changed_since(merge, undo_dir):
    change = merge(EXISTING, replace_mtp=True)
    data = json.loads(change.path.read_text())
    data["models"][MODEL]["dflash_verify_mode"] = "adaptive"
    data["models"][MODEL]["temperature"] = 0.5
    del data["models"][MODEL]["dflash_block_size"]
    change.path.write_text(json.dumps(data))
    undone = disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    entry = json.loads(change.path.read_text())["models"][MODEL]
    assert entry == {
        "model_alias": "qwen",
        "top_p": 0.95,
        "mtp_enabled": True,
        "dflash_verify_mode": "adaptive",
        "temperature": 0.5,
    }
    assert undone.warnings == ("dflash_verify_mode: changed since the export, left as it is",)


def test_a_record_that_outlived_its_write_does_not_count(merge, tmp_path, undo_dir, monkeypatch):
    def stopped(*args):
        raise OSError("stopped before the file was replaced")

    monkeypatch.setattr("mlx_dflash2.omlx.merge.replace_file", stopped)
    with pytest.raises(OSError, match="stopped"):
        merge(EXISTING, replace_mtp=True)
    monkeypatch.undo()
    by_hand = EXISTING.replace("qwen", 'qwen", "dflash_verify_mode": "adaptive')
    change = merge(by_hand, replace_mtp=True)
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert change.path.read_text() == by_hand


def test_two_models_are_undone_apart(merge, undo_dir):
    change = merge(EXISTING, replace_mtp=True)
    merge(document=settings("gpt-oss"))
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    models = json.loads(change.path.read_text())["models"]
    assert models[MODEL]["mtp_enabled"] is True and models["gpt-oss"]["dflash_enabled"] is True
    disable_settings(change.path, "gpt-oss", write=True, undo_dir=undo_dir)
    assert change.path.read_text() == EXISTING


def test_unset_and_merge_only_take_our_keys(merge):
    with pytest.raises(ValueError, match="--unset: found 'dflash_verify_mode'"):
        merge(EXISTING, unset=["dflash_verify_mode"])
    document = settings()
    document["models"][MODEL]["temperature"] = 1.0
    with pytest.raises(ValueError, match="settings key: found 'temperature'"):
        merge(document=document)
    with pytest.raises(ValueError, match="models: found 0 entries"):
        merge(document={"version": 1, "models": {}})


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"models": 1}'])
def test_a_broken_undo_record_stops_the_write(merge, undo_dir, raw):
    merge(EXISTING, replace_mtp=True)
    (record,) = undo_dir.iterdir()
    record.write_bytes(raw)
    with pytest.raises(ValueError, match="undo record"):
        merge(EXISTING, replace_mtp=True)


def test_off_only_keeps_the_keys_and_gives_mtp_back(merge, undo_dir):
    change = merge(EXISTING, replace_mtp=True)
    disable_settings(change.path, MODEL, off_only=True, write=True, undo_dir=undo_dir)
    entry = json.loads(change.path.read_text())["models"][MODEL]
    assert (entry["dflash_enabled"], entry["mtp_enabled"]) == (False, True)
    assert entry["dflash_block_size"] == 5


def test_disable_without_a_record_only_switches_off(tmp_path, undo_dir):
    path = tmp_path / "model_settings.json"
    path.write_text(json.dumps(settings()))
    change = disable_settings(path, MODEL, write=True, undo_dir=undo_dir)
    entry = json.loads(path.read_text())["models"][MODEL]
    assert entry == settings()["models"][MODEL] | {"dflash_enabled": False}
    assert "no undo record" in change.warnings[0]
    assert disable_settings(path, "no-such-model", undo_dir=undo_dir).empty


def test_disable_says_that_dflash_was_on_before(merge, undo_dir):
    text = json.dumps({"version": 1, "models": {MODEL: {"dflash_enabled": True}}})
    change = merge(text)
    undone = disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    # The switch itself was not changed, so the export has nothing to give back for it.
    assert json.loads(change.path.read_text()) == json.loads(text)
    assert undone.warnings == (
        "DFlash was on before the export and is again; --off-only switches it off",
    )


def test_half_a_surrogate_pair_survives_the_undo(merge, undo_dir):
    text = '{"version": 1, "models": {"%s": {"dflash_draft_model": "/x\\ud800é"}}}' % MODEL  # noqa: UP031
    change = merge(text)
    disable_settings(change.path, MODEL, write=True, undo_dir=undo_dir)
    assert json.loads(change.path.read_text()) == json.loads(text)


def test_mtp_is_replaced_only_when_asked(merge, tmp_path):
    with pytest.raises(ValueError, match="mtp_enabled: found true, allowed: false"):
        merge(EXISTING)
    assert (tmp_path / "model_settings.json").read_text() == EXISTING


@pytest.mark.parametrize("key, value", [("dflash_max_ctx", 0), ("dflash_draft_window_size", "x")])
def test_traps_already_in_the_file_are_refused_until_unset(merge, key, value):
    text = json.dumps({"version": 1, "models": {MODEL: {key: value}}})
    with pytest.raises(ValueError, match=f"{key}: found"):
        merge(text)
    change = merge(text, unset=[key])
    assert key not in json.loads(change.path.read_text())["models"][MODEL]


MALFORMED = [
    b"",
    b"not json",
    b"\xef\xbb\xbf" + EXISTING.encode(),
    EXISTING.encode("utf-16"),
    EXISTING.encode()[:-1],
    EXISTING.encode() + b"}",
    b'{"version": 1, "models": {}} // note',
    b'{"version": 1, "models": {"\xff": {}}}',
    b"[]",
    b"null",
    b'{"models": {}}',
    b'{"version": 2, "models": {}}',
    b'{"version": "1", "models": {}}',
    b'{"version": true, "models": {}}',
    b'{"version": 1.0, "models": {}}',
    b'{"version": 1}',
    b'{"version": 1, "models": null}',
    b'{"version": 1, "models": []}',
    b'{"version": 1, "models": {"other": null}}',
    b'{"version": 1, "models": {"%s": []}}' % MODEL.encode(),
    b'{"version": 1, "models": {}, "models": {"a": {}}}',
    b'{"version": 1, "models": {"a": {}, "a": {}}}',
    b'{"version": 1, "models": {"%s": {"top_k": 1, "top_k": 2}}}' % MODEL.encode(),
    b"[" * 100_000,
    b'{"version": 1, "models": {"a": {"n": ' + b"9" * 5000 + b"}}}",
]


@pytest.mark.parametrize("raw", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_files_are_reported_and_left_alone(merge, tmp_path, undo_dir, raw):
    with pytest.raises(ValueError) as error:
        merge(raw)
    path = tmp_path / "model_settings.json"
    assert path.read_bytes() == raw and os.listdir(tmp_path) == [path.name]
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(ValueError):
        disable_settings(path, MODEL, write=True, undo_dir=undo_dir)


def test_a_byte_order_mark_is_named(merge):
    with pytest.raises(ValueError, match="byte order mark, with which oMLX reads no settings"):
        merge(b"\xef\xbb\xbf" + EXISTING.encode())


@hypothesis_settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=200) | st.sampled_from(MALFORMED), cut=st.integers(0, 400))
def test_random_bytes_never_lead_to_a_write(raw, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model_settings.json"
        for content in (raw, EXISTING.encode()[:cut]):
            path.write_bytes(content)
            with pytest.raises(ValueError):
                merge_settings(path, settings(), write=True, undo_dir=Path(folder) / "undo")
            assert path.read_bytes() == content and os.listdir(folder) == [path.name]


def without_empty(document):
    """The document without empty entries, which mean the same as none."""
    models = {name: entry for name, entry in document["models"].items() if entry != {}}
    return json.dumps(document | {"models": models}, sort_keys=True)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@st.composite
def entries(draw):
    """An entry with foreign keys, and with DFlash keys of allowed values."""
    entry = draw(st.dictionaries(st.text(max_size=6), _VALUES, max_size=4))
    for field in draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=6)):
        by_kind = {bool: st.booleans(), int: st.integers(2, 99), str: st.just("/old/drafter")}
        values = st.sampled_from(field.choices) if field.choices else by_kind[field.kind]
        entry[field.name] = draw(values | st.none() if field.nullable else values)
    return dict(draw(st.permutations(list(entry.items()))))


@st.composite
def documents(draw):
    """A settings document in random order and layout, the target in it or not."""
    ids = st.sampled_from([MODEL, "b", "Org--Name", "ü/🙂", ""]) | st.text(max_size=5)
    models = draw(st.dictionaries(ids, entries(), max_size=4))
    top = draw(st.dictionaries(st.text(max_size=4), _VALUES, max_size=2))
    items = list((top | {"version": 1, "models": models}).items())
    indent = draw(st.sampled_from([None, 0, 1, 2, "\t"]))
    document = dict(draw(st.permutations(items)))
    return json.dumps(document, indent=indent)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=documents(), block_size=st.integers(2, 8))
def test_merge_then_disable_gives_back_the_meaning(text, block_size):
    with tempfile.TemporaryDirectory() as folder:
        path, undo = Path(folder) / "model_settings.json", Path(folder) / "undo"
        path.write_text(text, encoding="utf-8")
        original = json.loads(text)
        wanted = settings(block_size=block_size)
        change = merge_settings(path, wanted, replace_mtp=True, write=True, undo_dir=undo)
        merged = json.loads(path.read_text(encoding="utf-8"))
        expected = copy.deepcopy(original)
        expected["models"].setdefault(MODEL, {}).update(wanted["models"][MODEL])
        assert json.dumps(merged) == json.dumps(expected)
        assert merge_settings(path, wanted, write=True, undo_dir=undo).empty
        disable_settings(path, MODEL, write=True, undo_dir=undo)
        assert without_empty(json.loads(path.read_text())) == without_empty(original)
        assert change.empty or change.backup.read_text(encoding="utf-8") == text


# What can go wrong with files


def test_mode_and_owner_are_kept(merge, tmp_path):
    path = tmp_path / "model_settings.json"
    path.write_text(EXISTING)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65533)
    before = path.stat()
    change = merge(replace_mtp=True)
    for after in (path.stat(), change.backup.stat()):
        assert stat.S_IMODE(after.st_mode) == 0o640
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_symlink_stays_a_link(tmp_path, undo_dir):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").mkdir()
    real = tmp_path / "real" / "settings.json"
    real.write_text(EXISTING)
    link = tmp_path / "link" / "model_settings.json"
    link.symlink_to(real)
    merge_settings(link, settings(), replace_mtp=True, write=True, undo_dir=undo_dir)
    assert link.is_symlink() and "dflash_enabled" in real.read_text()
    assert os.listdir(link.parent) == [link.name]
    disable_settings(link, MODEL, write=True, undo_dir=undo_dir)
    assert real.read_text() == EXISTING


def test_unicode_paths_and_names(tmp_path, undo_dir):
    folder = tmp_path / "Größe – 模型"
    folder.mkdir()
    path = folder / "model_settings.json"
    document = settings("Qwen-模型", "/Users/ada/Größe/モデル")
    merge_settings(path, document, write=True, undo_dir=undo_dir)
    assert "/Users/ada/Größe/モデル" in path.read_text(encoding="utf-8")
    disable_settings(path, "Qwen-模型", write=True, undo_dir=undo_dir)
    assert json.loads(path.read_text()) == {"version": 1, "models": {}}


def test_a_file_that_changes_meanwhile_is_left_alone(merge, tmp_path, monkeypatch):
    path = tmp_path / "model_settings.json"
    theirs = EXISTING.replace("qwen", "changed by oMLX")
    fsync = os.fsync

    def changing(descriptor):
        path.write_text(theirs)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", changing)
    with pytest.raises(ValueError, match="another program changed it meanwhile"):
        merge(EXISTING, replace_mtp=True)
    assert path.read_text() == theirs
    assert not list(tmp_path.glob(".*.new"))


@pytest.mark.parametrize("call", ["write", "fsync", "fchmod", "replace", "open"])
def test_a_failing_disk_leaves_the_old_file(merge, tmp_path, monkeypatch, call):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    # The undo record lies elsewhere and has been written before; only this folder is full.
    real = getattr(os, call)

    def only_here(*args, **kwargs):
        first = os.readlink(f"/dev/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
        here = str(tmp_path / "undo") not in first
        return full() if here else real(*args, **kwargs)

    if not os.path.isdir("/dev/fd") or sys.platform == "darwin":
        only_here = full
    monkeypatch.setattr(os, call, only_here)
    with pytest.raises(OSError, match="No space left"):
        merge(EXISTING, replace_mtp=True)
    monkeypatch.undo()
    path = tmp_path / "model_settings.json"
    assert path.read_text() == EXISTING
    assert not list(tmp_path.glob(".*.new"))
    assert merge(replace_mtp=True).written


def test_a_full_disk(undo_dir):
    """A real file system of 64 KiB that has no room for the new file."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        if os.geteuid() != 0 or os.spawnvp(os.P_WAIT, mount[0], mount) != 0:
            pytest.skip("a small file system cannot be mounted here")
        try:
            path = Path(folder) / "model_settings.json"
            text = json.dumps({"version": 1, "models": {"a": {"note": "x" * 50_000}}})
            path.write_text(text)
            with pytest.raises(OSError) as error:
                merge_settings(path, settings(), write=True, undo_dir=undo_dir)
            assert error.value.errno == errno.ENOSPC
            assert path.read_text() == text and os.listdir(folder) == [path.name]
        finally:
            os.spawnvp(os.P_WAIT, "umount", ["umount", folder])


def in_child(action):
    """Run something in a forked child; return how it ended."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError as error:
            os._exit(error.errno)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_read_only_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "locked" / "model_settings.json"
        path.parent.mkdir()
        path.write_text(EXISTING)
        path.parent.chmod(0o555)
        undo = Path(folder) / "undo"
        undo.mkdir()
        undo.chmod(0o777)

        def action():
            if os.geteuid() == 0:
                os.seteuid(65534)
            merge_settings(path, settings(), replace_mtp=True, write=True, undo_dir=undo)

        assert os.waitstatus_to_exitcode(in_child(action)) == errno.EACCES
        assert path.read_text() == EXISTING and os.listdir(path.parent) == [path.name]
        path.parent.chmod(0o755)


STEPS = ("open", "write", "fsync", "fchmod", "close", "replace", "mkdir")


def killed_at(step, action):
    """Run an action in a child that is killed at its n-th call into the file system."""
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def child():
        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        action()

    return os.WIFSIGNALED(in_child(child))


@pytest.mark.parametrize("undoing", [False, True], ids=["export", "disable"])
def test_killed_at_each_step(tmp_path, undoing):
    outcomes = set()
    for step in range(1, 100):
        folder = tmp_path / f"{undoing}-{step}"
        folder.mkdir()
        path, undo = folder / "model_settings.json", folder / "undo"
        path.write_text(EXISTING)

        def export(path=path, undo=undo):
            merge_settings(path, settings(), replace_mtp=True, write=True, undo_dir=undo)

        def disable(path=path, undo=undo):
            disable_settings(path, MODEL, write=True, undo_dir=undo)

        planned = merge_settings(path, settings(), replace_mtp=True, undo_dir=undo).after
        if undoing:
            export()
        killed = killed_at(step, disable if undoing else export)
        found = path.read_bytes()
        assert found in (EXISTING.encode(), planned)
        outcomes.add(found)
        # Whatever was reached: the command can be run again, and undone.
        export()
        assert path.read_bytes() == planned
        disable()
        assert path.read_text() == EXISTING
        if not killed:
            break
    assert len(outcomes) == 2 and step > 10


def test_owner_that_cannot_be_kept_is_refused(merge, tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "model_settings.json"
    path.write_text(EXISTING)
    monkeypatch.setattr(os, "fchown", denied)
    real = os.stat

    def other_owner(target, **kwargs):
        found = list(real(target, **kwargs))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(store.os, "stat", other_owner)
    with pytest.raises(PermissionError):
        merge(replace_mtp=True)
    monkeypatch.undo()
    assert path.read_text() == EXISTING and not list(tmp_path.glob(".*.new"))


def test_missing_folder_is_not_created(tmp_path, undo_dir):
    path = tmp_path / "nowhere" / "model_settings.json"
    with pytest.raises(FileNotFoundError, match="start oMLX once"):
        merge_settings(path, settings(), write=True, undo_dir=undo_dir)
    assert not path.parent.exists()
