"""oMLX's file: nothing foreign is lost, nothing is half written, everything can be undone."""

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
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.omlx_tools import MODEL, documents, settings

from mlx_dflash2.omlx import disable_settings, merge_settings, store
from mlx_dflash2.omlx.file import parse_document
from mlx_dflash2.omlx.settings import refusals

EXISTING = json.dumps(
    {
        "version": 1,
        "x_note": "kept é 1.10",
        "models": {
            "gpt-oss": {"temperature": 0.7, "is_pinned": True, "some_future_key": [1, 2]},
            MODEL: {"model_alias": "qwen", "top_p": 0.95, "mtp_enabled": True},
            "mlx-community--Other": {"ttl_seconds": 900},
        },
    },
    indent=2,
    ensure_ascii=False,
)
MTP = ["mtp_enabled"]


@pytest.fixture
def undo_dir(tmp_path):
    return tmp_path / "undo"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model_settings.json"


@pytest.fixture
def merge(path, undo_dir):
    """Merge the recommended settings into a file of the given text."""

    def run(text=None, write=True, document=None, **kwargs):
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        document = document or settings()
        return merge_settings(path, document, write=write, undo_dir=undo_dir, **kwargs)

    return run


@pytest.fixture
def disable(path, undo_dir):
    def run(model=MODEL, write=True, **kwargs):
        return disable_settings(path, model, write=write, undo_dir=undo_dir, **kwargs)

    return run


def entry(path, model=MODEL):
    return json.loads(path.read_text(encoding="utf-8"))["models"][model]


def backups(path):
    return sorted(path.parent.glob("model_settings.json.backup-*"))


def test_new_file(merge, disable, path):
    change = merge()
    assert change.place == str(path) and path.read_text() == json.dumps(settings(), indent=2)
    assert backups(path) == []
    disable()
    assert json.loads(path.read_text()) == {"version": 1, "models": {}}


def test_plan_writes_nothing(merge, tmp_path):
    change = merge(write=False)
    assert '+  "dflash_enabled": true,' in change.diff and os.listdir(tmp_path) == []


def test_foreign_settings_stay_and_a_file_of_omlx_comes_back_byte_for_byte(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    merged, original = json.loads(path.read_text()), json.loads(EXISTING)
    assert list(merged) == list(original) and list(merged["models"]) == list(original["models"])
    assert merged["models"].pop(MODEL).items() >= settings()["models"][MODEL].items()
    del original["models"][MODEL]
    assert merged == original
    (backup,) = backups(path)
    assert backup.read_text() == EXISTING
    disable()
    assert path.read_text() == EXISTING


@pytest.mark.parametrize(
    "text",
    [
        '{"version":1,"models":{}}',
        '{"version": 1, "models": {"%s": {}}}' % MODEL,  # noqa: UP031
        '{"models":{"%s":{"top_k":1}},"version":1}' % MODEL,  # noqa: UP031
        '{\r\n\t"version": 1,\r\n\t"models": {\r\n\t\t"a": {"b": 1}\r\n\t}\r\n}\r\n',
        '{"version": 1, "models": {"\\ud800": {"lone": "\\udfff", "big": 1234567890123456789}}}',
        ' {"version": 1, "models": {"a": {"x": {"models": {"y": 1}, "version": 7}}}} ',
    ],
    ids=["compact", "empty-entry", "other-order", "crlf-tabs", "surrogates", "nested"],
)
def test_layouts(merge, disable, path, text):
    merge(text)
    data = parse_document(path.read_bytes())
    assert data["models"][MODEL].items() >= settings()["models"][MODEL].items()
    disable()
    assert without_empty(json.loads(path.read_text())) == without_empty(json.loads(text))


def test_second_export_changes_nothing(merge, tmp_path):
    merge(EXISTING, turn_off=MTP)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    second = merge()
    assert second.empty and second.diff == ""
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_undo_spans_several_exports(merge, disable, path, undo_dir):
    merge(EXISTING, turn_off=MTP)
    merge(document=settings(block_size=4, chip="M1"))
    disable()
    assert path.read_text() == EXISTING and list(undo_dir.iterdir()) == []
    assert disable().empty


def test_undo_keeps_what_others_changed_since(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    data = json.loads(path.read_text())
    data["models"][MODEL] |= {"dflash_verify_mode": "adaptive", "temperature": 0.5}
    del data["models"][MODEL]["dflash_block_size"]
    path.write_text(json.dumps(data))
    undone = disable()
    assert entry(path) == {
        "model_alias": "qwen",
        "top_p": 0.95,
        "mtp_enabled": True,
        "dflash_verify_mode": "adaptive",
        "temperature": 0.5,
    }
    assert undone.warnings == ("dflash_verify_mode: changed since the export, left as it is",)


def test_undo_after_another_drafter_was_chosen_by_hand(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    path.write_text(path.read_text().replace("Tiny-DFlash2", "Other-DFlash2"))
    disable()
    assert entry(path)["mtp_enabled"] is True and "dflash_enabled" not in entry(path)


def test_a_record_that_outlived_its_write_does_not_count(merge, disable, path, monkeypatch):
    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlx_dflash2.omlx.file.replace_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        merge(EXISTING, turn_off=MTP)
    monkeypatch.undo()
    by_hand = EXISTING.replace('"qwen"', '"qwen",\n      "dflash_verify_mode": "adaptive"')
    merge(by_hand, turn_off=MTP)
    disable()
    assert path.read_text() == by_hand


def test_two_models_are_undone_apart(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    merge(document=settings("gpt-oss"))
    disable()
    assert entry(path)["mtp_enabled"] is True and entry(path, "gpt-oss")["dflash_enabled"] is True
    disable("gpt-oss")
    assert path.read_text() == EXISTING


def test_two_places_are_undone_apart(tmp_path, undo_dir):
    """The same id in two base directories: each gets its own back."""
    paths = [tmp_path / name / "model_settings.json" for name in ("a", "b")]
    texts = [EXISTING, EXISTING.replace('"mtp_enabled": true', '"mtp_enabled": false')]
    for path, text in zip(paths, texts, strict=True):
        path.parent.mkdir()
        path.write_text(text)
        merge_settings(path, settings(), turn_off=MTP, write=True, undo_dir=undo_dir)
    for path, text in zip(reversed(paths), reversed(texts), strict=True):
        disable_settings(path, MODEL, write=True, undo_dir=undo_dir)
        assert path.read_text() == text


def test_the_record_of_another_place_counts_where_it_is_in_force(merge, path, undo_dir):
    """As when a file was exported to, and its server is asked afterwards, or the reverse."""
    merge(EXISTING, turn_off=MTP)
    moved = path.parent / "moved" / path.name
    moved.parent.mkdir()
    path.rename(moved)
    disable_settings(moved, MODEL, write=True, undo_dir=undo_dir)
    assert moved.read_text() == EXISTING and list(undo_dir.iterdir()) == []


def test_the_record_of_another_place_does_not_count_elsewhere(merge, path, undo_dir):
    merge(EXISTING, turn_off=MTP)
    other = path.parent / "other.json"
    by_hand = {"dflash_enabled": True, "dflash_draft_model": "/by/hand", "mtp_enabled": False}
    other.write_text(json.dumps({"version": 1, "models": {MODEL: by_hand}}))
    change = disable_settings(other, MODEL, undo_dir=undo_dir)
    assert change.after == by_hand | {"dflash_enabled": False}
    assert "no undo record" in change.warnings[0]


def test_only_our_keys_are_set_and_removed(merge):
    with pytest.raises(ValueError, match="--unset: found 'dflash_verify_mode'"):
        merge(EXISTING, unset=["dflash_verify_mode"])
    with pytest.raises(ValueError, match="--unset: found 'temperature'"):
        merge(EXISTING, unset=["temperature"])
    with pytest.raises(ValueError, match="--turn-off: found 'is_pinned'"):
        merge(EXISTING, turn_off=["is_pinned"])
    document = settings()
    document["models"][MODEL]["temperature"] = 1.0
    with pytest.raises(ValueError, match="settings key: found 'temperature'"):
        merge(document=document)
    with pytest.raises(ValueError, match="models: found 0 entries"):
        merge(document={"version": 1, "models": {}})


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"records": 1}', b'{"records": [{"place": "x"}]}'])
def test_a_broken_undo_record_stops_the_write(merge, undo_dir, raw):
    merge(EXISTING, turn_off=MTP)
    (record,) = undo_dir.iterdir()
    record.write_bytes(raw)
    with pytest.raises(ValueError, match="undo record") as error:
        merge(EXISTING, turn_off=MTP)
    assert str(record) in str(error.value)


def test_off_only_keeps_the_keys_and_gives_mtp_back(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    disable(off_only=True)
    assert (entry(path)["dflash_enabled"], entry(path)["mtp_enabled"]) == (False, True)
    assert entry(path)["dflash_block_size"] == 5


def test_disable_without_a_record_only_switches_off(path, disable):
    path.write_text(json.dumps(settings()))
    change = disable()
    assert entry(path) == settings()["models"][MODEL] | {"dflash_enabled": False}
    assert "no undo record" in change.warnings[0]
    assert disable("no-such-model").empty


def test_disable_says_that_dflash_was_on_before(merge, disable, path):
    text = json.dumps({"version": 1, "models": {MODEL: {"dflash_enabled": True}}})
    merge(text)
    undone = disable()
    # The switch itself was not changed, so the export has nothing to give back for it.
    assert json.loads(path.read_text()) == json.loads(text)
    assert undone.warnings == (
        "DFlash was on before the export and is again; --off-only switches it off",
    )


def test_mtp_is_replaced_only_when_asked(merge, path):
    with pytest.raises(ValueError, match=r"mtp_enabled: found true, .* --replace-mtp resolves"):
        merge(EXISTING)
    assert path.read_text() == EXISTING


@pytest.mark.parametrize(
    "values, flag",
    [
        ({"vlm_mtp_enabled": True}, "--replace-mtp"),
        ({"moe_expert_offload_enabled": True}, "--turn-off moe_expert_offload_enabled"),
        (
            {"moe_expert_offload_resident_fraction": 1.5},
            "--unset moe_expert_offload_resident_fraction",
        ),
        (
            {"qwen35_oq_a8_enabled": True, "qwen35_oq_a8_min_tokens": 0},
            "--unset qwen35_oq_a8_min_tokens",
        ),
    ],
)
def test_what_omlx_would_drop_is_refused_resolved_and_given_back(
    merge, disable, path, values, flag
):
    text = json.dumps({"version": 1, "models": {MODEL: {"top_k": 20} | values}}, indent=2)
    with pytest.raises(ValueError, match=f"drop all settings of the model; {flag} resolves it"):
        merge(text)
    assert path.read_text() == text
    (key,) = values.keys() - {"qwen35_oq_a8_enabled"}
    merge(**({"unset": [key]} if "unset" in flag else {"turn_off": [key]}))
    assert not entry(path).get(key) and entry(path)["dflash_enabled"] is True
    disable()
    assert path.read_text() == text


def test_what_was_turned_on_since_is_not_lost_by_the_undo(merge, disable, path):
    merge(EXISTING, turn_off=MTP)
    data = json.loads(path.read_text())
    data["models"][MODEL]["moe_expert_offload_enabled"] = True
    data["models"][MODEL]["dflash_enabled"] = False
    path.write_text(json.dumps(data))
    undone = disable()
    assert entry(path)["moe_expert_offload_enabled"] is True
    assert entry(path)["mtp_enabled"] is False
    assert "mtp_enabled stays off" in undone.warnings[-1]


@pytest.mark.parametrize("key, value", [("dflash_max_ctx", 0), ("dflash_draft_window_size", "x")])
def test_traps_already_in_the_file_are_refused_until_unset(merge, path, key, value):
    text = json.dumps({"version": 1, "models": {MODEL: {key: value}}})
    with pytest.raises(ValueError, match=f"{key}: found"):
        merge(text)
    merge(text, unset=[key])
    assert key not in entry(path)


def test_backups_are_thinned(merge, disable, path):
    kept = path.with_name("model_settings.json.backup-mine")
    kept.write_text("by hand")
    for _ in range(7):
        merge(EXISTING, turn_off=MTP)
        disable()
    assert len(backups(path)) == 11 and kept in backups(path)
    newest = backups(path)[-2]
    assert "dflash_enabled" in newest.read_text()


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
    b'{"version": 1, "models": {"a": {"n": NaN}}}',
    b'{"version": 1, "models": {"a": {"n": -Infinity}}}',
    b'{"version": 1, "models": {"a": {"n": 1e999}}}',
    b'{"version": 1, "models": {"a": {"deep": [{"x": 1, "x": 1}]}}}',
]


@pytest.mark.parametrize("raw", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_files_are_reported_and_left_alone(merge, disable, path, tmp_path, raw):
    with pytest.raises(ValueError) as error:
        merge(raw)
    assert path.read_bytes() == raw and os.listdir(tmp_path) == [path.name]
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(ValueError):
        disable()


def test_a_byte_order_mark_is_named(merge):
    with pytest.raises(ValueError, match="byte order mark, with which oMLX reads no settings"):
        merge(b"\xef\xbb\xbf" + EXISTING.encode())


@hypothesis_settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=200) | st.sampled_from(MALFORMED), cut=st.integers(0, 400))
def test_random_bytes_never_lead_to_a_write(raw, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model_settings.json"
        # Hypothesis also tries byte strings of the code that it tests, one of which is valid.
        assume(b"models" not in raw or raw in MALFORMED)
        for content in (raw, EXISTING.encode()[:cut]):
            path.write_bytes(content)
            with pytest.raises(ValueError):
                merge_settings(path, settings(), write=True, undo_dir=Path(folder) / "undo")
            assert path.read_bytes() == content and os.listdir(folder) == [path.name]


def without_empty(document):
    """The document without empty entries, which mean the same as none."""
    models = {name: entry for name, entry in document["models"].items() if entry != {}}
    return json.dumps(document | {"models": models}, sort_keys=True)


def meaning_comes_back(text, block_size):
    with tempfile.TemporaryDirectory() as folder:
        path, undo = Path(folder) / "model_settings.json", Path(folder) / "undo"
        path.write_text(text, encoding="utf-8")
        original = json.loads(text)
        # What oMLX would have dropped before does not come back as it was.
        assume(not refusals(original["models"].get(MODEL, {})))
        wanted = settings(block_size=block_size)
        off = ["mtp_enabled", "vlm_mtp_enabled"]
        change = merge_settings(path, wanted, turn_off=off, write=True, undo_dir=undo)
        merged = json.loads(path.read_text(encoding="utf-8"))
        expected = copy.deepcopy(original)
        expected["models"].setdefault(MODEL, {}).update(wanted["models"][MODEL])
        assert json.dumps(merged) == json.dumps(expected)
        assert merge_settings(path, wanted, write=True, undo_dir=undo).empty
        disable_settings(path, MODEL, write=True, undo_dir=undo)
        assert without_empty(json.loads(path.read_text("utf-8"))) == without_empty(original)
        assert change.empty or backups(path)[0].read_text(encoding="utf-8") == text


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=documents(), block_size=st.integers(2, 8))
def test_merge_then_disable_gives_back_the_meaning(text, block_size):
    meaning_comes_back(text, block_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@hypothesis_settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=documents(), block_size=st.integers(2, 8))
def test_ten_thousand_random_documents(text, block_size):
    meaning_comes_back(text, block_size)


# What can go wrong with files


def test_mode_and_owner_are_kept(merge, path):
    path.write_text(EXISTING)
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65533)
    before = path.stat()
    merge(turn_off=MTP)
    for after in (path.stat(), backups(path)[0].stat()):
        assert stat.S_IMODE(after.st_mode) == 0o640
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_symlink_stays_a_link(tmp_path, undo_dir):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").mkdir()
    real = tmp_path / "real" / "settings.json"
    real.write_text(EXISTING)
    link = tmp_path / "link" / "model_settings.json"
    link.symlink_to(real)
    merge_settings(link, settings(), turn_off=MTP, write=True, undo_dir=undo_dir)
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


def test_a_file_that_changes_meanwhile_is_left_alone(merge, path, undo_dir, monkeypatch):
    theirs = EXISTING.replace("qwen", "changed by oMLX")
    fsync = os.fsync

    def changing(descriptor):
        path.write_text(theirs)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", changing)
    with pytest.raises(ValueError, match="another program changed it meanwhile"):
        merge(EXISTING, turn_off=MTP)
    assert path.read_text() == theirs and set(os.listdir(path.parent)) == {path.name, "undo"}
    assert os.listdir(undo_dir) == []


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace", "open"])
def test_a_failing_disk_leaves_the_old_file(merge, path, tmp_path, monkeypatch, call):
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
        merge(EXISTING, turn_off=MTP)
    monkeypatch.undo()
    assert path.read_text() == EXISTING and os.listdir(tmp_path / "undo") == []
    assert set(os.listdir(tmp_path)) == {path.name, "undo"}
    merge(turn_off=MTP)
    assert "dflash_enabled" in path.read_text()


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
            assert error.value.errno == errno.ENOSPC and str(path) in str(error.value)
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
            merge_settings(path, settings(), turn_off=MTP, write=True, undo_dir=undo)

        assert os.waitstatus_to_exitcode(in_child(action)) == errno.EACCES
        assert path.read_text() == EXISTING and os.listdir(path.parent) == [path.name]
        path.parent.chmod(0o755)


STEPS = ("open", "fsync", "fchmod", "close", "replace", "mkdir", "unlink", "stat")


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
    outcomes, planned = set(), None
    for step in range(1, 100):
        folder = tmp_path / f"{undoing}-{step}"
        folder.mkdir()
        path, undo = folder / "model_settings.json", folder / "undo"
        path.write_text(EXISTING)

        def export(path=path, undo=undo):
            merge_settings(path, settings(), turn_off=MTP, write=True, undo_dir=undo)

        def disable(path=path, undo=undo):
            disable_settings(path, MODEL, write=True, undo_dir=undo)

        export()
        planned = path.read_bytes()
        if not undoing:
            disable()
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


def test_owner_that_cannot_be_kept_is_refused(merge, path, tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path.write_text(EXISTING)
    monkeypatch.setattr(os, "fchown", denied)
    real = os.stat

    def other_owner(target, **kwargs):
        found = list(real(target, **kwargs))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr(store.os, "stat", other_owner)
    with pytest.raises(PermissionError):
        merge(turn_off=MTP)
    monkeypatch.undo()
    assert path.read_text() == EXISTING and not list(tmp_path.glob(".*.new"))


def test_missing_folder_is_not_created(tmp_path, undo_dir):
    path = tmp_path / "nowhere" / "model_settings.json"
    with pytest.raises(FileNotFoundError, match="start oMLX once"):
        merge_settings(path, settings(), write=True, undo_dir=undo_dir)
    assert not path.parent.exists()
