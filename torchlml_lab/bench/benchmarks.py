"""`torchlml bench NAME`: the benchmarks by name; a further one is a module with `main` and a line here."""

from collections.abc import Sequence

from torchlml_lab.cli import Command, choose

BENCHMARKS = {
    "layer": Command("torchlml_lab.bench.grid_benchmark:layer", "lml beside softmax, topk, sort and sigmoid"),
    "family": Command("torchlml_lab.bench.grid_benchmark:constrained", "the relatives of lml beside softmax"),
    "losses": Command("torchlml_lab.bench.losses", "the losses beside cross-entropy, on fixed problems"),
    "peers": Command("torchlml_lab.bench.alternatives", "other differentiable top-k: cost, exactness, uses"),
    "scale": Command("torchlml_lab.bench.scale", "very many labels: time, memory and rounds"),
    "paper": Command("torchlml_lab.bench.paper", "the paper's timing study, with its figure"),
}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that is named first in the arguments."""
    choose("bench", BENCHMARKS, arguments)
