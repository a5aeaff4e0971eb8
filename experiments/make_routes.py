"""Train a small mixture-of-experts language model on Python's own library and write what its gates choose.

    python experiments/make_routes.py [--steps N] [--seed S] [--out FILE]

Nothing is downloaded: the text is the standard library of the interpreter that runs this, and every tenth module is
held out. The file holds, for every layer, the experts and weights of 4,096 consecutive held-out tokens in the format of
`afdep_sim.routing`; it is made with `--steps 500 --seed 0`, the defaults. Needs torch, which nothing else here does.
One thread; the same versions on the same kind of CPU give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import platform
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afdep_sim.errors import Refusal
from afdep_sim.routing import check_routes, example, imbalance, read_routes
from afdep_sim.trace import write_whole

try:
    import torch
    from torch.nn import functional as F  # noqa: N812
except ModuleNotFoundError:
    torch = None  # main refuses

LAYERS = 4
EXPERTS = 128
TOPK = 8
WIDTH = 64
HEADS = 2
HIDDEN = 32
"""Of one expert."""
VOCABULARY = 2048
CONTEXT = 256
BATCH = 4
"""Sequences of CONTEXT tokens per step."""
RATE = 3e-3
WARM_UP = 20
BALANCE = 0.01
"""Weight of the load-balancing loss."""
TOKENS = 4096
"""Held-out tokens whose routes are recorded."""
SHARES = (1, 2, 4)
BAD_ARGUMENTS = 64

# ---- text ------------------------------------------------------------------------------------------------------------

PIECES = re.compile(r" ?[A-Za-z]+|\n *| +|.", re.DOTALL)
"""What a token may be: a word with a space before it, a line's end with the next indent, spaces, one character."""


@dataclass(frozen=True)
class Text:
    """The modules to train on and those held out, as text of one character per byte (Latin-1)."""

    train: str
    held_out: str
    modules: tuple[str, ...]
    held_out_modules: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of both texts, to tell whether another interpreter brings the same."""
        return hashlib.sha256((self.train + "\0" + self.held_out).encode("latin-1")).hexdigest()


def read_text(folder: Path) -> Text:
    """The library's top-level modules in `folder`, in order of their names; the 6th of every ten is held out.

    A module that is not the library's, such as what a build wrote about its own machine, is left out.
    """
    files = [file for file in sorted(folder.glob("*.py")) if file.stem in sys.stdlib_module_names]
    parts: tuple[list[Path], list[Path]] = ([], [])
    for number, file in enumerate(files):
        parts[number % 10 == 5].append(file)
    train, held_out = ("".join(file.read_bytes().decode("latin-1") for file in part) for part in parts)
    return Text(train, held_out, tuple(f.stem for f in parts[0]), tuple(f.stem for f in parts[1]))


def make_vocabulary(text: str, size: int) -> dict[str, int]:
    """Piece -> token: the 256 bytes, then the most frequent longer pieces of the text (ties in order of the pieces)."""
    counts = Counter(piece for piece in PIECES.findall(text) if len(piece) > 1)
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))[: size - 256]
    return {piece: token for token, piece in enumerate([*map(chr, range(256)), *pieces])}


def cut(piece: str, vocabulary: dict[str, int]) -> Iterator[int]:
    """The tokens of one piece: again and again the longest beginning that is in the vocabulary."""
    while piece:
        end = next(end for end in range(len(piece), 0, -1) if piece[:end] in vocabulary)
        yield vocabulary[piece[:end]]
        piece = piece[end:]


def tokenise(text: str, vocabulary: dict[str, int]) -> np.ndarray:
    """Text -> int64 tokens."""
    pieces = PIECES.findall(text)
    cuts = {piece: list(cut(piece, vocabulary)) for piece in set(pieces)}
    return np.array([token for piece in pieces for token in cuts[piece]], np.int64)


# ---- model -----------------------------------------------------------------------------------------------------------

Parameters = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Gate:
    """What a layer's gate chose: int64 and float [tokens, TOPK], and the layer's load-balancing loss (1 is even)."""

    chosen: torch.Tensor
    weights: torch.Tensor
    balance: torch.Tensor


def make_parameters(seed: int) -> Parameters:
    """Normal draws, scaled by fan-in; what adds to the residual stream is scaled down by the number of additions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    inner, outer = WIDTH**-0.5, (2 * LAYERS) ** -0.5
    parameters = {
        "embedding": normal(VOCABULARY, WIDTH, scale=0.02),
        "position": normal(CONTEXT, WIDTH, scale=0.02),
    }
    for layer in range(LAYERS):
        parameters |= {
            f"{layer}.qkv": normal(WIDTH, 3 * WIDTH, scale=inner),
            f"{layer}.out": normal(WIDTH, WIDTH, scale=inner * outer),
            f"{layer}.gate": normal(WIDTH, EXPERTS, scale=inner),
            f"{layer}.up": normal(EXPERTS, WIDTH, HIDDEN, scale=inner),
            f"{layer}.down": normal(EXPERTS, HIDDEN, WIDTH, scale=HIDDEN**-0.5 * outer),
        }
    return parameters


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,))


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Causal self-attention of [sequences, tokens, WIDTH]."""
    sequences, tokens, _ = x.shape
    heads = (x @ qkv).view(sequences, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
    return mixed.transpose(1, 2).reshape(x.shape) @ out


def choose(x: torch.Tensor, gate: torch.Tensor) -> Gate:
    """Softmax over all experts, the TOPK largest, their weights made to sum to 1. x: [tokens, WIDTH]."""
    shares = F.softmax(x @ gate, dim=-1)
    weights, chosen = shares.topk(TOPK, dim=-1)
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
    balance = EXPERTS * (load * shares.mean(0)).sum()
    return Gate(chosen, weights / weights.sum(-1, keepdim=True), balance)


def run_experts(x: torch.Tensor, gate: Gate, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The weighted sum of every token's experts; no route is dropped. x: [tokens, WIDTH]."""
    expert, order = gate.chosen.flatten().sort(stable=True)
    counts = torch.bincount(expert, minlength=EXPERTS).tolist()
    token = order // TOPK
    parts = zip(x[token].split(counts), up.unbind(), down.unbind(), strict=True)
    results = torch.cat([F.relu(rows @ into) @ back for rows, into, back in parts])
    return torch.zeros_like(x).index_add(0, token, results * gate.weights.flatten()[order, None])


def forward(p: Parameters, tokens: torch.Tensor) -> tuple[torch.Tensor, list[Gate]]:
    """int64 [sequences, tokens] -> (logits [sequences, tokens, VOCABULARY], what each layer's gate chose)."""
    x = normed(p["embedding"][tokens] + p["position"][: tokens.shape[1]])
    gates = []
    for layer in range(LAYERS):
        x = x + attention(normed(x), p[f"{layer}.qkv"], p[f"{layer}.out"])
        rows = normed(x).flatten(0, 1)
        gates.append(choose(rows, p[f"{layer}.gate"]))
        x = x + run_experts(rows, gates[-1], p[f"{layer}.up"], p[f"{layer}.down"]).view(x.shape)
    return normed(x) @ p["embedding"].T, gates


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- training and recording ------------------------------------------------------------------------------------------


def rate_at(step: int, steps: int) -> float:
    """The learning rate: a linear rise over WARM_UP steps, then a cosine down to a tenth."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(p: Parameters, tokens: np.ndarray, steps: int, seed: int) -> None:
    """AdamW on random places of the text."""
    places = np.random.default_rng(seed).integers(len(tokens) - CONTEXT, size=(steps, BATCH))
    optimiser = torch.optim.AdamW(p.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate_at(step, steps)
        batch = torch.from_numpy(tokens[places[step, :, None] + np.arange(CONTEXT + 1)])
        logits, gates = forward(p, batch[:, :-1])
        loss = loss_of(logits, batch[:, 1:])
        balance = torch.stack([gate.balance for gate in gates]).mean()
        optimiser.zero_grad()
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  balance {balance.item():.3f}", flush=True)


def record(p: Parameters, tokens: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """(loss, int16 [LAYERS, TOKENS, TOPK], float16 the same) of TOKENS tokens, each CONTEXT of them on its own."""
    windows = [torch.from_numpy(tokens[start : start + CONTEXT + 1]) for start in range(0, TOKENS, CONTEXT)]
    losses, topk, weights = [], [], []
    with torch.no_grad():
        for window in windows:
            logits, gates = forward(p, window[None, :-1])
            losses.append(loss_of(logits, window[None, 1:]).item())
            topk.append(torch.stack([gate.chosen for gate in gates]).numpy())
            weights.append(torch.stack([gate.weights for gate in gates]).numpy())
    joined = np.concatenate(topk, axis=1), np.concatenate(weights, axis=1)
    return sum(losses) / len(losses), joined[0].astype(np.int16), joined[1].astype(np.float16)


def packed(topk: np.ndarray, weights: np.ndarray) -> bytes:
    """The .npz file; its bytes follow from the arrays (NumPy dates every member 1980)."""
    file = io.BytesIO()
    np.savez_compressed(file, topk=topk, weights=weights)
    return file.getvalue()


def load_table(topk: np.ndarray) -> str:
    """A Markdown table: per layer, the busiest expert and the busiest of equal shares of experts over the mean."""
    lines = ["| layer | experts | " + " | ".join(f"{n} share{'s' * (n > 1)}" for n in SHARES) + " |"]
    lines.append("|" + " ---: |" * (2 + len(SHARES)))
    for layer, routes in enumerate(topk):
        values = [imbalance(routes, EXPERTS, groups) for groups in (EXPERTS, *SHARES)]
        lines.append(f"| {layer} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return "\n".join(lines)


def make(steps: int, seed: int, out: Path) -> None:
    """Everything, reported on standard output. Raises `Refusal`."""
    if steps < 1:
        raise Refusal(f"steps {steps} is below 1")
    if seed < 0:
        raise Refusal(f"seed {seed} is below 0")
    if not out.parent.is_dir():
        raise Refusal(f"folder {str(out.parent)!r} of {out.name} does not exist")
    if torch is None:
        raise Refusal("torch is not installed, and this script trains a model with it (2.13.0 made the file)")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    text = read_text(Path(sysconfig.get_paths()["stdlib"]))
    vocabulary = make_vocabulary(text.train, VOCABULARY)
    tokens, held_out = tokenise(text.train, vocabulary), tokenise(text.held_out, vocabulary)
    if len(held_out) <= TOKENS:
        raise Refusal(f"the held-out modules have {len(held_out)} tokens, not more than {TOKENS}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}")
    print(f"text {text.digest}")
    print(f"train {len(text.modules)} modules, {len(text.train)} bytes, {len(tokens)} tokens")
    print(f"held out {', '.join(text.held_out_modules)}: {len(text.held_out)} bytes, {len(held_out)} tokens")
    parameters = make_parameters(seed)
    print(f"{sum(p.numel() for p in parameters.values())} parameters")
    before, _, _ = record(parameters, held_out)
    start = time.perf_counter()
    train(parameters, tokens, steps, seed)
    seconds = time.perf_counter() - start
    after, topk, weights = record(parameters, held_out)
    check_routes(topk, EXPERTS)
    content = packed(topk, weights)
    write_whole(out, content)
    read_routes(str(out), TOPK, EXPERTS)
    print(f"{steps} steps in {seconds:.0f} s; held-out loss {before:.3f} before, {after:.3f} after")
    print(f"{out}: {len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}\n")
    print(load_table(topk))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default 0)")
    parser.add_argument("--out", type=Path, default=Path(example()), help="the file (default: the one that ships)")
    options = parser.parse_args()
    try:
        make(options.steps, options.seed, options.out)
    except Refusal as refusal:
        print(f"make_routes.py: {refusal}", file=sys.stderr)
        return BAD_ARGUMENTS
    return 0


if __name__ == "__main__":
    sys.exit(main())
