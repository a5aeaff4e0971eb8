"""Files of routes: what is taken from one, every refusal, load imbalance, and the example that ships."""

from __future__ import annotations

import importlib.util
import io
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from afdep_sim.errors import Refusal
from afdep_sim.routing import RouteFile, check_routes, example, imbalance, read_routes

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "experiments" / "make_routes.py"

GOOD = np.array([[[0, 1], [2, 3], [4, -1]], [[7, 6], [5, 4], [-1, -1]]])
"""Two layers of three tokens, top-2 of 8 experts."""

EXPERTS = 8


@pytest.fixture(autouse=True)
def _forget_files() -> Iterator[None]:
    """Files are read once per path and process; a test's own file must not outlive it."""
    yield
    read_routes.cache_clear()


def refused(topk: np.ndarray, message: str, experts: int = EXPERTS) -> None:
    with pytest.raises(Refusal) as refusal:
        check_routes(topk, experts)
    assert str(refusal.value) == message


# ---- what is taken ---------------------------------------------------------------------------------------------------


def numbered(layers: int, tokens: int) -> RouteFile:
    """Layer l, token t, lane j: expert 100 l + 10 t + j, of that weight."""
    layer, token, lane = np.ogrid[:layers, :tokens, :2]
    topk = (100 * layer + 10 * token + lane).astype(np.int64)
    return RouteFile(topk, topk.astype(np.float32))


def test_take_cuts_a_layer_into_runs():
    topk, weights = numbered(2, 6).take(1, 1, 2)
    assert topk.tolist() == [[120, 121], [130, 131]]
    assert weights.tolist() == [[120.0, 121.0], [130.0, 131.0]]
    assert (topk.dtype, weights.dtype) == (np.int64, np.float32)
    assert topk.flags.c_contiguous
    assert weights.flags.c_contiguous


@pytest.mark.parametrize(
    ("place", "tokens", "rows"),
    [
        (0, 3, [0, 1, 2]),
        (1, 3, [3, 4, 0]),
        (2, 3, [1, 2, 3]),
        (5, 3, [0, 1, 2]),
        (-1, 3, [2, 3, 4]),
        (0, 12, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]),
        (3, 0, []),
    ],
)
def test_take_goes_round_the_end(place: int, tokens: int, rows: list[int]):
    topk, weights = numbered(1, 5).take(0, place, tokens)
    assert topk.shape == weights.shape == (tokens, 2)
    assert (topk[:, 0] // 10).tolist() == rows
    assert (weights == topk).all()


@pytest.mark.parametrize(("layer", "taken"), [(0, 0), (2, 2), (3, 0), (7, 1)])
def test_take_goes_round_the_layers(layer: int, taken: int):
    assert numbered(3, 2).take(layer, 0, 1)[0].tolist() == [[100 * taken, 100 * taken + 1]]


def test_what_is_taken_is_a_copy():
    file = numbered(1, 4)
    topk, weights = file.take(0, 0, 4)
    topk[:] = -1
    weights[:] = 0
    assert file.topk[0, 1].tolist() == [10, 11]
    assert file.weights[0, 1].tolist() == [10.0, 11.0]


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_routes_that_fit_pass(dtype: type):
    check_routes(GOOD.astype(dtype), EXPERTS)
    check_routes(GOOD[0, 0].astype(dtype), EXPERTS)
    check_routes(np.zeros((0, 2), dtype), EXPERTS)


def test_no_route_may_be_named_more_than_once():
    check_routes(np.full((3, 4), -1), EXPERTS)


@pytest.mark.parametrize("value", [-2, -8, -(1 << 31), -(1 << 40), -(1 << 63)])
def test_a_negative_expert_other_than_no_route_is_refused(value: int):
    routes = GOOD.copy()
    routes[1, 2, 0] = value
    refused(routes, f"routes has expert {value} at [1, 2, 0], outside 0 to 7 (-1 is no route)")


@pytest.mark.parametrize("value", [8, 9, 1 << 31, (1 << 32) + 3, 1 << 40, (1 << 63) - 1])
def test_an_expert_beyond_the_last_is_refused(value: int):
    """2^32 + 3 is expert 3 once it is cut to 32 bits."""
    routes = GOOD.copy()
    routes[0, 1, 1] = value
    refused(routes, f"routes has expert {value} at [0, 1, 1], outside 0 to 7 (-1 is no route)")


def test_the_last_expert_is_one_below_the_bound():
    check_routes(np.array([[6, 7]]), 8)
    refused(np.array([[6, 7]]), "routes has expert 7 at [0, 1], outside 0 to 6 (-1 is no route)", experts=7)


@pytest.mark.parametrize("value", [8, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_unsigned_routes_are_compared_as_they_are(value: int):
    """2^64 - 1 is -1, no route, once it is signed."""
    refused(np.array([[0, value]], np.uint64), f"routes has expert {value} at [0, 1], outside 0 to 7 (-1 is no route)")


def test_an_expert_twice_in_a_row_is_refused():
    refused(np.array([[[0, 1, 2], [5, 3, 5]]]), "routes has expert 5 twice in row [0, 1], more than once")
    refused(np.array([[0, 1, 2], [-1, 0, 0]]), "routes has expert 0 twice in row [1], more than once")
    check_routes(np.array([[0, 1], [1, 0]]), EXPERTS)


def test_the_first_wrong_route_is_named():
    refused(np.array([[0, 1], [9, -2]]), "routes has expert 9 at [1, 0], outside 0 to 7 (-1 is no route)")


def test_a_refusal_names_what_the_routes_are():
    with pytest.raises(Refusal, match="^the routes of rank 3 has expert 8 at"):
        check_routes(np.array([[8]]), 8, "the routes of rank 3")


# ---- files -----------------------------------------------------------------------------------------------------------


def saved(folder: Path, content: bytes | None = None, **arrays: np.ndarray) -> str:
    path = folder / "routes.npz"
    if content is None:
        np.savez_compressed(path, **arrays)
    else:
        path.write_bytes(content)
    return str(path)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members_of:
        for name, content in members.items():
            members_of.writestr(name, content)
    return file.getvalue()


def damaged() -> bytes:
    """An archive whose table of contents is right and whose compressed rows are not."""
    file = io.BytesIO()
    np.savez_compressed(file, topk=np.random.default_rng(0).permuted(np.tile(np.arange(8), (1, 500, 1)), axis=2))
    content = bytearray(file.getvalue())
    content[200:260] = b"\xff" * 60
    return bytes(content)


def refusal_of(path: str, topk: int = 2, experts: int = EXPERTS) -> str:
    with pytest.raises(Refusal) as refusal:
        read_routes(path, topk, experts)
    text = str(refusal.value)
    assert text.startswith(f"routing file {path!r} ")
    return text.removeprefix(f"routing file {path!r} ")


@pytest.mark.parametrize("dtype", [np.int8, np.int16, ">i4", np.int64])
def test_a_file_is_read_whatever_its_integers(tmp_path: Path, dtype: str | type):
    weights = np.arange(12, dtype=np.float16).reshape(2, 3, 2)
    file = read_routes(saved(tmp_path, topk=GOOD.astype(dtype), weights=weights), 2, EXPERTS)
    assert (file.topk.dtype, file.weights.dtype) == (np.int64, np.float32)
    assert (file.topk == GOOD).all()
    assert (file.weights == weights).all()


def test_unsigned_routes_are_read(tmp_path: Path):
    routes = GOOD[:, :2].astype(np.uint64)
    assert (read_routes(saved(tmp_path, topk=routes), 2, EXPERTS).topk == GOOD[:, :2]).all()


def test_one_layer_needs_no_axis(tmp_path: Path):
    weights = np.array([[0.5, 0.25], [1, 2], [3, 4]])
    file = read_routes(saved(tmp_path, topk=GOOD[0], weights=weights), 2, EXPERTS)
    assert file.topk.tolist() == [GOOD[0].tolist()]
    assert file.weights.tolist() == [weights.tolist()]


def test_without_weights_every_lane_weighs_the_same(tmp_path: Path):
    file = read_routes(saved(tmp_path, topk=GOOD), 2, EXPERTS)
    assert file.weights.shape == GOOD.shape
    assert (file.weights == 0.5).all()
    assert file.weights.dtype == np.float32


def test_a_missing_file_is_refused(tmp_path: Path):
    assert refusal_of(str(tmp_path / "none.npz")) == "does not exist"
    assert refusal_of(str(tmp_path)) == "does not exist"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"topk 1 2 3",
        npy(GOOD),
        archive(topk=npy(GOOD))[:60],
        damaged(),
        pickle.dumps({"topk": GOOD}),
    ],
    ids=["empty", "text", "npy", "cut", "damaged", "pickle"],
)
def test_what_is_no_archive_of_arrays_is_refused(tmp_path: Path, content: bytes):
    assert refusal_of(saved(tmp_path, content)).startswith("is not an .npz file of plain arrays (")


@pytest.mark.parametrize("name", ["topk", "weights", "other"])
def test_pickled_objects_are_not_loaded(tmp_path: Path, name: str):
    arrays = {"topk": GOOD, name: np.array([{"a": 1}], object)}
    text = refusal_of(saved(tmp_path, **arrays))
    assert text == "is not an .npz file of plain arrays (Object arrays cannot be loaded when allow_pickle=False)"


def test_a_file_without_topk_is_refused(tmp_path: Path):
    assert refusal_of(saved(tmp_path, routes=GOOD, other=GOOD)) == "has no array named topk (it has other, routes)"
    assert refusal_of(saved(tmp_path, archive())) == "has no array named topk (it has none)"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.bool_, np.complex64, "S1", "U1", "M8[s]"])
def test_topk_of_another_dtype_is_refused(tmp_path: Path, dtype: str | type):
    routes = np.zeros((1, 3, 2), dtype)
    assert refusal_of(saved(tmp_path, topk=routes)) == f"has topk of dtype {routes.dtype}, not integers"


def test_a_member_that_is_no_array_is_refused(tmp_path: Path):
    assert refusal_of(saved(tmp_path, archive(topk=b"0 1 2"))) == "has topk of dtype |S5, not integers"
    mixed = archive(**{"topk.npy": npy(GOOD), "weights": b"0 1 2"})
    assert refusal_of(saved(tmp_path, mixed)) == "has weights of dtype |S5, not floats"


@pytest.mark.parametrize("shape", [(), (2,), (3, 3), (1, 3, 1), (1, 3, 3), (1, 1, 3, 2), (0, 3, 2), (2, 0, 2), (0, 2)])
def test_topk_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]):
    text = refusal_of(saved(tmp_path, topk=np.zeros(shape, np.int64)))
    assert text == f"has topk of shape {shape}, not [layers, tokens, 2]"


def test_a_file_of_another_top_k_is_refused(tmp_path: Path):
    assert refusal_of(saved(tmp_path, topk=GOOD), topk=8) == "has topk of shape (2, 3, 2), not [layers, tokens, 8]"


def test_routes_of_a_file_are_checked(tmp_path: Path):
    path = saved(tmp_path, topk=GOOD)
    assert refusal_of(path, experts=7) == "has expert 7 at [1, 0, 0], outside 0 to 6 (-1 is no route)"
    twice = np.array([[[1, 1]]], np.int16)
    assert refusal_of(saved(tmp_path, topk=twice)) == "has expert 1 twice in row [0, 0], more than once"
    wide = np.array([[[0, (1 << 32) + 1]]])
    text = refusal_of(saved(tmp_path, topk=wide))
    assert text == "has expert 4294967297 at [0, 0, 1], outside 0 to 7 (-1 is no route)"


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1])
def test_a_file_s_unsigned_routes_do_not_turn_negative(tmp_path: Path, value: int):
    routes = np.array([[[0, value]]], np.uint64)
    assert refusal_of(saved(tmp_path, topk=routes)).startswith(f"has expert {value}")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, "S1"])
def test_weights_of_another_dtype_are_refused(tmp_path: Path, dtype: str | type):
    weights = np.zeros(GOOD.shape, dtype)
    text = refusal_of(saved(tmp_path, topk=GOOD, weights=weights))
    assert text == f"has weights of dtype {weights.dtype}, not floats"


@pytest.mark.parametrize("shape", [(), (2, 3), (3, 2), (2, 3, 1), (2, 2, 3), (12,)])
def test_weights_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]):
    text = refusal_of(saved(tmp_path, topk=GOOD, weights=np.zeros(shape, np.float32)))
    assert text == f"has weights of shape {shape}, not (2, 3, 2)"


def test_weights_have_the_axes_of_topk(tmp_path: Path):
    text = refusal_of(saved(tmp_path, topk=GOOD[0], weights=np.zeros((1, 3, 2), np.float32)))
    assert text == "has weights of shape (1, 3, 2), not (3, 2)"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.nan, np.float16), (np.inf, np.float32), (-np.inf, np.float64), (1e300, np.float64)],
)
@pytest.mark.filterwarnings("error")
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: type):
    """1e300 is finite in the file and not in float32, which is what a token carries."""
    weights = np.ones(GOOD.shape, dtype)
    weights[1, 0, 1] = value
    text = refusal_of(saved(tmp_path, topk=GOOD, weights=weights))
    assert text == f"has weight {weights[1, 0, 1]} at [1, 0, 1], not finite in float32"


def test_a_refused_file_is_read_again(tmp_path: Path):
    path = saved(tmp_path, topk=GOOD + 8)
    refusal_of(path)
    saved(tmp_path, topk=GOOD)
    assert (read_routes(path, 2, EXPERTS).topk == GOOD).all()


# ---- imbalance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, 1.0),
        (2, 4 / 3),  # 4 and 2 of 6 routes
        (4, 2.0),  # 3, 1, 2, 0
        (8, 8 / 3),  # 2, 1, 1, 0, 2, 0, 0, 0: 2 over 6 / 8
    ],
)
def test_imbalance_by_hand(groups: int, expected: float):
    routes = np.array([[0, 1], [0, 2], [4, -1], [-1, 4]])
    assert imbalance(routes, 8, groups) == pytest.approx(expected)
    assert imbalance(routes.astype(np.int8), 8, groups) == pytest.approx(expected)
    assert imbalance(routes[None], 8, groups) == pytest.approx(expected)


def test_even_routes_have_an_imbalance_of_one():
    assert imbalance(np.arange(8).reshape(4, 2), 8, 8) == 1.0


def test_all_routes_in_one_share_are_as_many_times_the_mean_as_there_are_shares():
    assert imbalance(np.array([[0, 1], [1, 0]]), 8, 4) == 4.0


def test_no_routes_are_even():
    assert imbalance(np.full((3, 2), -1), 8, 4) == 1.0
    assert imbalance(np.zeros((0, 2), np.int64), 8, 4) == 1.0


def test_narrow_routes_reach_no_share_that_they_cannot_hold():
    """256 experts per share are more than an int8 can be divided by."""
    assert imbalance(np.array([[127, 3]], np.int8), 512, 2) == 2.0


@pytest.mark.parametrize("groups", [3, 16, 0, -2])
def test_shares_are_equal(groups: int):
    with pytest.raises(ValueError, match=f"8 experts do not make {groups} equal shares"):
        imbalance(GOOD, 8, groups)


def test_imbalance_is_of_the_experts_there_are():
    with pytest.raises(ValueError, match="expert 7 is outside 0 to 3"):
        imbalance(GOOD, 4, 2)


# ---- the example -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> RouteFile:
    return read_routes(example(), 8, 128)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that made the example; it is imported, with or without torch, and trains nothing."""
    spec = importlib.util.spec_from_file_location("make_routes", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_has_four_layers_of_distinct_routes(shipped: RouteFile):
    assert shipped.topk.shape == shipped.weights.shape == (4, 4096, 8)
    assert (shipped.topk >= 0).all()
    assert (np.diff(np.sort(shipped.topk, axis=2), axis=2) > 0).all()
    for one in range(4):
        for other in range(one):
            assert (np.sort(shipped.topk[one]) != np.sort(shipped.topk[other])).any(axis=1).mean() > 0.99


def test_the_example_s_weights_are_a_gate_s(shipped: RouteFile):
    """Largest first, positive, of sum 1 as far as float16 holds them."""
    assert (shipped.weights > 0).all()
    assert (np.diff(shipped.weights, axis=2) <= 0).all()
    assert np.abs(shipped.weights.sum(axis=2) - 1).max() < 2e-3


def test_the_example_s_file_is_small_and_its_bytes_follow_from_its_arrays(script: ModuleType):
    content = Path(example()).read_bytes()
    assert len(content) < 400_000
    with np.load(example(), allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["topk", "weights"]
        topk, weights = arrays["topk"], arrays["weights"]
    assert (topk.dtype, weights.dtype) == (np.int16, np.float16)
    with zipfile.ZipFile(example()) as members:
        assert {member.date_time for member in members.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert script.packed(topk, weights) == script.packed(topk.copy(), weights.copy())


def test_the_example_fits_no_other_shape():
    with pytest.raises(Refusal, match=r"has topk of shape \(4, 4096, 8\), not \[layers, tokens, 4\]"):
        read_routes(example(), 4, 128)
    with pytest.raises(Refusal, match=r"outside 0 to 63 \(-1 is no route\)"):
        read_routes(example(), 8, 64)


def test_the_documented_imbalance_is_the_example_s(shipped: RouteFile, script: ModuleType):
    text = (ROOT / "docs" / "routes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
    for layer, *values in rows:
        routes = shipped.topk[int(layer)]
        assert values == [f"{imbalance(routes, 128, groups):.3f}" for groups in (128, 1, 2, 4)]
    assert script.load_table(shipped.topk) in text


def test_the_example_is_uneven_and_no_layer_is_degenerate(shipped: RouteFile):
    for routes in shipped.topk:
        assert 1.5 < imbalance(routes, 128, 128) < 16
        assert 1 < imbalance(routes, 128, 4) < 2


# ---- the script ------------------------------------------------------------------------------------------------------


def test_without_torch_the_script_refuses_in_one_sentence(tmp_path: Path):
    """`None` in `sys.modules` is a package that is not there, whether or not it is."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    out = tmp_path / "routes.npz"
    result = subprocess.run(
        [sys.executable, "-c", code, str(SCRIPT), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 64
    assert result.stdout == ""
    assert result.stderr.startswith("make_routes.py: torch is not installed")
    assert result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("steps", "seed", "folder", "message"),
    [
        (0, 0, ".", "steps 0 is below 1"),
        (1, -1, ".", "seed -1 is below 0"),
        (1, 0, "none", "folder .* of routes.npz does not exist"),
    ],
)
def test_the_script_s_arguments_are_bounded(
    tmp_path: Path, script: ModuleType, steps: int, seed: int, folder: str, message: str
):
    with pytest.raises(Refusal, match=message):
        script.make(steps, seed, tmp_path / folder / "routes.npz")


def test_the_script_s_tokens_join_to_the_text(script: ModuleType):
    text = "def first(a):\n    return  a[0]  # \xff\n\ndef second(b):\n    return b"
    vocabulary = script.make_vocabulary(text, 256 + 6)
    tokens = script.tokenise(text, vocabulary)
    pieces = {token: piece for piece, token in vocabulary.items()}
    assert len(vocabulary) == 262
    assert "".join(pieces[token] for token in tokens.tolist()) == text
    assert vocabulary["\n    "] in tokens
    assert len(tokens) < len(text)


def test_the_script_holds_out_every_tenth_module(tmp_path: Path, script: ModuleType):
    names = sorted(sys.stdlib_module_names)[:23]
    for name in names:
        (tmp_path / f"{name}.py").write_bytes(f"# {name}\n".encode())
    (tmp_path / "_sysconfigdata__here.py").write_text("where = 'a machine'\n")
    text = script.read_text(tmp_path)
    assert text.held_out_modules == (names[5], names[15])
    assert text.held_out == f"# {names[5]}\n# {names[15]}\n"
    assert text.modules == tuple(name for name in names if name not in text.held_out_modules)
    assert "machine" not in text.train + text.held_out
