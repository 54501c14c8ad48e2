"""The prompts stage: what is kept, rejected and split, and what a key and a split's bytes depend on."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from infra.artifacts import Artifact, ArtifactStore
from infra.errors import UserError
from tasks import prompts
from tasks.prompts import SPLITS, PromptsConfig, assign_split, collect_prompts, normalise, read_split
from tests.hub import COMMITS, TOKEN, Hub, load_artifact, run_apart, serve


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "root")


def write_lines(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"turns": [f"Question number {i}?"]} for i in range(start, start + count)]


def collect(store: ArtifactStore, *sources: str, **config: Any) -> Artifact:
    return collect_prompts(store, PromptsConfig(sources=list(sources), **config))


def everything(artifact: Artifact) -> list[prompts.Prompt]:
    return [prompt for split in SPLITS for prompt in read_split(artifact, split)]


def rejected(artifact: Artifact) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(artifact.file("rejected/rejected.parquet")).to_pylist()
    return rows


def test_seed_set_is_usable_as_it_is(store: ArtifactStore) -> None:
    artifact = collect(store, "seed")
    kept = everything(artifact)
    assert len(kept) == artifact.counts["rows"] > 300, "no seed prompt is rejected"
    assert all(len(read_split(artifact, split)) >= 20 for split in SPLITS)
    assert len({prompt.category for prompt in kept}) == 8 and any(len(prompt.turns) > 1 for prompt in kept)
    table = pq.read_table(artifact.file("train.parquet"))
    assert table.schema.equals(prompts.SCHEMA) and set(table["split"].to_pylist()) == {"train"}
    assert table["prompt_id"].to_pylist() == sorted(table["prompt_id"].to_pylist())


def test_each_bad_row_is_rejected_with_its_reason_and_the_rest_go_on(store: ArtifactStore, tmp_path: Path) -> None:
    rows: list[Any] = [
        {"turns": ["Good one"], "prompt_id": "g1", "category": "math", "source": "me"},
        {"prompt": "Good two"},
        {"turns": [{"role": "user", "content": "Good three"}, {"role": "assistant", "content": "no"}]},
        {"conversations": [{"from": "human", "value": "Good four"}, {"from": "gpt", "value": "no"}]},
        {"turns": ["  good   ONE "]},
        {"turns": []},
        {"turns": ["fine", " \n"]},
        {"turns": [{"role": "assistant", "content": "nobody asked"}]},
        {"turns": [{"content": "who says this?"}]},
        {"turns": ["x" * 101]},
        {"turns": [7]},
        {"turns": "a string is one turn"},
        {"prompt": {"nested": 1}},
        {"other": "column"},
        {"turns": ["half a character \ud800"]},
        "not JSON at all",
        ["a", "list"],
    ]
    artifact = collect(store, write_lines(tmp_path / "p.jsonl", rows), max_prompt_chars=100)
    kept = {prompt.turns: prompt for prompt in everything(artifact)}
    assert set(kept) == {("Good one",), ("Good two",), ("Good three",), ("Good four",), ("a string is one turn",)}
    one, two = kept[("Good one",)], kept[("Good two",)]
    assert (one.prompt_id, one.category, one.source) == ("g1", "math", "me")
    assert one.answers == () and kept[("Good three",)].answers == kept[("Good four",)].answers == ("no",)
    assert two.prompt_id.startswith("p-") and (two.category, two.source) == ("general", "p")
    reasons = {row["row"]: row["reason"] for row in rejected(artifact)}
    expected = {4: "duplicate", 5: "empty", 6: "empty", 7: "empty", 8: "role-less", 9: "over-long", 10: "not text"}
    expected |= {12: "not text", 13: "empty", 14: "not text", 15: "not text", 16: "not text"}
    assert reasons == expected
    assert artifact.counts["rows"] == len(rows) == artifact.counts["kept"] + artifact.counts["rejected"]
    assert artifact.counts["reasons"] == dict(Counter(expected.values()))


def test_answers_are_kept_up_to_the_first_turn_without_one(store: ArtifactStore, tmp_path: Path) -> None:
    """Catches an answer that moves to another turn when one is missing, empty, or given twice."""
    spoken = [("system", "be kind"), ("gpt", "early"), ("human", "a"), ("gpt", "A"), ("gpt", "again"), ("human", "b")]
    spoken += [("gpt", " "), ("human", "c"), ("gpt", "C")]
    row = {"conversations": [{"from": who, "value": text} for who, text in spoken]}
    (prompt,) = everything(collect(store, write_lines(tmp_path / "p.jsonl", [row])))
    assert (prompt.turns, prompt.answers) == (("a", "b", "c"), ("A",))


def test_rows_that_vanish_are_noticed(store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_apply_limit", lambda good, config: (good[1:], []))
    with pytest.raises(AssertionError, match="5 rows in, 4 kept and 0 rejected"):
        collect(store, write_lines(tmp_path / "p.jsonl", numbered(5)))


def test_normalisation_and_split() -> None:
    assert normalise(["Hello\n  World"]) == normalise(["ｈｅｌｌｏ world "])
    assert normalise(["a", "b"]) != normalise(["a b"])
    shares = {"train": 0.7, "calibration": 0.15, "benchmark": 0.15}
    points = (0, int(0.69 * 2**64), int(0.71 * 2**64), int(0.86 * 2**64), 2**64 - 1)
    sides = [assign_split(f"{point:016x}", shares) for point in points]
    assert sides == ["train", "train", "calibration", "benchmark", "benchmark"]


def test_a_duplicate_never_straddles_two_splits(store: ArtifactStore, tmp_path: Path) -> None:
    rows = numbered(200)
    shouted = [{"turns": [row["turns"][0].upper() + "  "], "prompt_id": f"loud-{i}"} for i, row in enumerate(rows)]
    sides = [
        {normalise(p.turns): split for split in SPLITS for p in read_split(collect(store, source), split)}
        for source in (write_lines(tmp_path / "a.jsonl", rows), write_lines(tmp_path / "b.jsonl", shouted))
    ]
    assert sides[0] == sides[1] and len(sides[0]) == 200
    assert all(20 < Counter(sides[0].values())[split] < 160 for split in SPLITS)


@pytest.mark.parametrize("limit", [None, 40])
@pytest.mark.parametrize("position", ["first", "last"])
def test_a_benchmark_prompt_leaves_training_bytes_alone(
    store: ArtifactStore, tmp_path: Path, limit: int | None, position: str
) -> None:
    rows = numbered(100)
    extra = next(row for row in numbered(1000, start=500) if _side(store, tmp_path, row) == "benchmark")
    more = [extra, *rows] if position == "first" else [*rows, extra]
    before = collect(store, write_lines(tmp_path / "x" / "p.jsonl", rows), limit=limit)
    after = collect(store, write_lines(tmp_path / "y" / "p.jsonl", more), limit=limit)
    assert before.key != after.key
    for split in ("train", "calibration"):
        assert before.digest(f"{split}.parquet") == after.digest(f"{split}.parquet")
    if limit is None:
        assert before.digest("benchmark.parquet") != after.digest("benchmark.parquet")


def _side(store: ArtifactStore, tmp_path: Path, row: dict[str, Any]) -> str:
    config = PromptsConfig()
    return prompts._read_row(0, row, "x", config).split


def test_limit_is_deterministic_and_shared_out(store: ArtifactStore, tmp_path: Path) -> None:
    rows = numbered(200)
    artifact = collect(store, write_lines(tmp_path / "a" / "p.jsonl", rows), limit=20)
    backwards = collect(store, write_lines(tmp_path / "b" / "p.jsonl", rows[::-1]), limit=20)
    assert [artifact.counts[split] for split in SPLITS] == [14, 3, 3]
    assert everything(artifact) == everything(backwards)
    assert {row["reason"] for row in rejected(artifact)} == {"beyond limit"}


def test_ids_stay_unique_within_a_split(store: ArtifactStore, tmp_path: Path) -> None:
    rows = [{**row, "prompt_id": "same"} for row in numbered(50)]
    artifact = collect(store, write_lines(tmp_path / "p.jsonl", rows))
    for split in SPLITS:
        ids = [prompt.prompt_id for prompt in read_split(artifact, split)]
        assert len(ids) == len(set(ids)) > 1 and "same" in ids


def test_key_follows_content_and_config_not_folder(store: ArtifactStore, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", numbered(20))
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(path, tmp_path / "moved" / "p.jsonl")
    first, second = collect(store, path), collect(store, str(moved))
    assert second.cached and first.key == second.key
    assert collect(store, path, limit=5).key != first.key
    assert collect(store, path, max_prompt_chars=30).key != first.key
    assert collect(store, write_lines(tmp_path / "p.jsonl", numbered(21))).key != first.key


def test_json_and_parquet_give_what_jsonl_gives(store: ArtifactStore, tmp_path: Path) -> None:
    rows = numbered(12)
    lines = collect(store, write_lines(tmp_path / "p.jsonl", rows))
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    for name in ("p.json", "p.parquet"):
        assert everything(collect(store, str(tmp_path / name))) == everything(lines)


def test_bad_sources_are_refused_by_name(store: ArtifactStore, tmp_path: Path) -> None:
    def refuse(source: str, expected: str) -> None:
        with pytest.raises(UserError, match=expected):
            collect(store, source)
        assert not list((store.root / "artifacts").rglob("*.partial"))

    refuse(str(tmp_path / "gone.jsonl"), "gone.jsonl' does not exist")
    refuse(write_lines(tmp_path / "p.csv", ["a,b"]), "must end with one of .jsonl, .json, .parquet, not '.csv'")
    refuse(
        write_lines(tmp_path / "q.jsonl", [{"question": "x"}]), "q.jsonl has columns question; it needs one of turns"
    )
    bad = [{"turns": []}, {"turns": [{"content": "x"}]}, {"turns": []}]
    refuse(write_lines(tmp_path / "bad.jsonl", bad), r"bad.jsonl has no usable row among 3 \(empty: 2, role-less: 1\)")
    refuse(write_lines(tmp_path / "none.jsonl", []), "none.jsonl has no rows")
    refuse(write_lines(tmp_path / "object.json", [{"turns": ["x"]}]), "must hold a JSON array")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 or not")
    refuse(str(tmp_path / "broken.parquet"), "broken.parquet can't be read as parquet")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "Grüße"}\n'.encode("latin-1"))
    refuse(str(tmp_path / "latin.jsonl"), "latin.jsonl can't be read as text")
    refuse("hub:", "must look like hub:NAME")


def test_a_source_of_duplicates_only_is_no_error(store: ArtifactStore, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", numbered(10))
    artifact = collect(store, path, path)
    assert (artifact.counts["kept"], artifact.counts["reasons"]) == (10, {"duplicate": 10})


@pytest.mark.parametrize("split", [{"train": 1.0}, {"train": 0.9, "calibration": 0.2, "benchmark": 0.1}])
def test_bad_shares_are_refused(split: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="adding up to 1"):
        PromptsConfig(split=split)


# Runs the stage in a fresh process.
collect_apart = partial(run_apart, "from tasks.prompts import PromptsConfig as Config, collect_prompts as stage")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A set of chats: a JSONL file of turns at first, a Parquet file of messages now."""
    write_lines(tmp_path / "old" / "chat.jsonl", numbered(20))
    chats = [
        {"messages": [{"role": "user", "content": f"Chat {i}?"}, {"role": "assistant", "content": "!"}]}
        for i in range(30)
    ]
    (tmp_path / "new").mkdir()
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "new" / "chat.parquet")
    with serve({"datasets/team/chat": {"main": tmp_path / "new", "v1": tmp_path / "old"}}) as server:
        yield server


def test_hub_set_is_loaded_pinned_and_authorised(tmp_path: Path, hub: Hub) -> None:
    """Catches rows that don't arrive or come from another revision, a token that isn't sent, needless look-ups."""
    code, line, errors = collect_apart(tmp_path, {"sources": ["hub:team/chat@v1"]}, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 0, line + errors
    old = load_artifact(line)
    assert {prompt.turns for prompt in everything(old)} == {tuple(row["turns"]) for row in numbered(20)}
    assert {prompt.source for prompt in everything(old)} == {"team/chat"}
    assert hub.requests and {token for _, token in hub.requests} == {f"Bearer {TOKEN}"}
    written = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()] and TOKEN not in line + errors

    # What `datasets` would do instead: hand out the revision it has cached.
    other = {"sources": [f"hub:team/chat@{COMMITS['main']}"]}
    code, line, _ = collect_apart(tmp_path, other, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert code == 2 and COMMITS["main"] in line, line

    code, line, errors = collect_apart(tmp_path, {"sources": ["hub:team/chat"]}, HF_ENDPOINT=hub.url)
    assert code == 0, line + errors
    newest = load_artifact(line)
    assert {prompt.turns for prompt in everything(newest)} == {(f"Chat {i}?",) for i in range(30)}
    assert newest.manifest["inputs"]["source.0"] != old.manifest["inputs"]["source.0"] and newest.key != old.key

    # A full commit names its content, so what was collected from it once is found without asking.
    hub.requests.clear()
    pinned = {"sources": [f"hub:team/chat@{COMMITS['v1']}"]}
    code, line, errors = collect_apart(tmp_path, pinned, HF_ENDPOINT=hub.url)
    assert code == 0 and load_artifact(line).path == old.path, line + errors
    assert not hub.requests


def test_hub_set_without_a_hub_fails_in_seconds(tmp_path: Path) -> None:
    start = time.monotonic()
    code, line, _ = collect_apart(tmp_path, {"sources": ["hub:team/chats"]}, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 2 and "hub:team/chats' can't be looked up" in line
    assert time.monotonic() - start < 30
