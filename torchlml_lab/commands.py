"""All `torchlml` commands. Each has a settings dataclass with its options, and a function to call.

The settings modules import neither torch nor any other slow package, so that `--help` and invalid options are
handled immediately. The function's module is imported only after the options are parsed.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """A command. `settings` and `function` have the form `module:name`, relative to `torchlml_lab`."""

    settings: str
    """A dataclass whose fields are the options, or a function that builds one from the arguments."""
    function: str
    """The function that is called with the settings."""
    summary: str = ""
    """A short description, listed in the help of commands such as `torchlml bench`."""
    required: tuple[str, ...] = ()
    """The names of the settings that must be given on the command line."""


class Task(NamedTuple):
    """The commands for a task. None means that the task does not support the command."""

    train: Command
    sweep: Command
    evaluate: Command
    """Takes the run directory as its first argument, as do `predict`, `export` and `step_time`.
    Only `step_time` of `scene-graph` also works without one."""
    predict: Command | None = None
    export: Command | None = None
    step_time: Command | None = None


_RUN = ("run",)

TASKS = {
    "cifar100": Task(
        train=Command(
            "studies.cifar100.settings:read_train",
            "studies.cifar100.task:main",
            "classify CIFAR-100 images with label noise (top 5)",
        ),
        sweep=Command(
            "studies.cifar100.settings:read_sweep",
            "studies.cifar100.sweep:main",
            "compare losses at several noise levels and learning rates",
        ),
        evaluate=Command(
            "studies.cifar100.settings:EvaluateSettings", "studies.cifar100.task:evaluate", required=_RUN
        ),
        step_time=Command(
            "studies.cifar100.settings:LossTimesSettings", "studies.cifar100.task:step_time", required=_RUN
        ),
    ),
    "multilabel": Task(
        train=Command(
            "multilabel.settings:MultilabelSettings",
            "multilabel.training:main",
            "tag texts or feature vectors from your own files",
            required=("train",),
        ),
        sweep=Command(
            "multilabel.settings:SweepSettings",
            "multilabel.sweep:main",
            "compare losses at several label fractions and learning rates",
        ),
        evaluate=Command("multilabel.settings:EvaluateSettings", "multilabel.report:main", required=_RUN),
        predict=Command(
            "multilabel.settings:PredictSettings", "multilabel.prediction:main", required=("run", "data")
        ),
        export=Command("multilabel.settings:ExportSettings", "multilabel.program:main", required=_RUN),
    ),
    "scene-graph": Task(
        train=Command(
            "studies.scene_graph.settings:SceneGraphSettings",
            "studies.scene_graph.task:main",
            "predict all relations in an image (Visual Genome, VRD)",
        ),
        sweep=Command(
            "studies.scene_graph.settings:SweepSettings",
            "studies.scene_graph.sweep:main",
            "compare methods with several learning rates",
        ),
        evaluate=Command(
            "studies.scene_graph.settings:EvaluateSettings",
            "studies.scene_graph.task:evaluate",
            required=_RUN,
        ),
        predict=Command(
            "studies.scene_graph.settings:PredictSettings",
            "studies.scene_graph.prediction:main",
            required=_RUN,
        ),
        step_time=Command(
            "studies.scene_graph.settings:ObjectiveTimesSettings", "studies.scene_graph.task:step_time"
        ),
    ),
    "recommend": Task(
        train=Command(
            "recommend.settings:RecommendSettings",
            "recommend.training:main",
            "recommend items to users, using your own files",
            required=("train",),
        ),
        sweep=Command(
            "recommend.settings:SweepSettings",
            "recommend.sweep:main",
            "compare models and losses with several learning rates",
        ),
        evaluate=Command("recommend.settings:EvaluateSettings", "recommend.training:evaluate", required=_RUN),
        predict=Command("recommend.settings:PredictSettings", "recommend.prediction:main", required=_RUN),
        step_time=Command(
            "recommend.settings:LossTimesSettings", "recommend.training:step_time", required=_RUN
        ),
    ),
}

BENCHMARKS = {
    "layer": Command(
        "bench.settings:read_layer",
        "bench.grid_benchmark:layer",
        "time and memory of lml, softmax, topk, sort and a copy",
    ),
    "short": Command(
        "bench.settings:ShortRowsSettings",
        "bench.targets:short_rows",
        "speed of lml on many short rows, relative to softmax",
    ),
    "constrained": Command(
        "bench.settings:read_constrained",
        "bench.grid_benchmark:constrained",
        "time and memory of operators related to lml",
    ),
    "subsets": Command(
        "bench.settings:SubsetSettings",
        "bench.subsets:main",
        "the exact k-subset distribution compared with other methods",
    ),
    "balanced": Command(
        "bench.settings:BalancedSettings",
        "bench.targets:balanced",
        "speed of balanced_lml, relative to lml",
    ),
    "losses": Command(
        "bench.settings:LossesSettings",
        "bench.targets:losses",
        "speed of the losses, relative to a baseline loss",
    ),
    "alternatives": Command(
        "bench.settings:read_alternatives",
        "bench.alternatives:main",
        "cost and accuracy of other differentiable top-k operators",
    ),
    "scale": Command(
        "bench.settings:ScaleSettings",
        "bench.scale:main",
        "time, memory and communication rounds with many labels",
    ),
    "training": Command(
        "bench.settings:TrainingSettings",
        "bench.scale:training",
        "speed and memory of `train multilabel` by data size",
    ),
    "own-data": Command(
        "bench.settings:OwnDataSettings",
        "bench.own_data:main",
        "the default tagging model compared with other packages",
    ),
    "one-vs-rest": Command(
        "multilabel.settings:OneVsRestSettings",
        "multilabel.one_vs_rest:main",
        "the logistic-regression baseline of the multi-label study",
        required=("train", "test"),
    ),
    "paper": Command(
        "bench.settings:read_paper", "bench.paper:main", "the paper's timing study, with its figure"
    ),
}

FIGURES = {
    "projection": Command(
        "figures.settings:ProjectionSettings",
        "figures.projection:projection",
        "outputs of softmax, sigmoid and lml for ten logits",
    ),
    "sliding-sigmoid": Command(
        "figures.settings:SlidingSigmoidSettings",
        "figures.projection:sliding_sigmoid",
        "animation of a sigmoid sliding until its outputs sum to k",
    ),
    "polytopes": Command(
        "figures.settings:PolytopesSettings",
        "figures.geometry:polytopes",
        "the polytopes L(3,1), L(3,2) and L(4,2), with projections",
    ),
    "root-finding": Command(
        "figures.settings:RootFindingSettings",
        "figures.projection:root_finding",
        "how the threshold nu is bracketed and found",
    ),
    "entropies": Command(
        "figures.settings:EntropiesSettings",
        "figures.geometry:entropies",
        "the entropies that sigmoid, softmax and lml maximize",
    ),
    "which-relaxation": Command(
        "figures.settings:RelaxationsSettings",
        "figures.projection:which_relaxation",
        "outputs of five top-k relaxations for the same logits",
    ),
    "sets": Command(
        "figures.settings:SetsFigureSettings",
        "figures.geometry:sets",
        "difference between lml and exact inclusion probabilities",
    ),
    "benchmarks": Command(
        "figures.settings:BenchmarksFigureSettings",
        "bench.speed_report:benchmarks",
        "time relative to softmax as a function of n, with tables",
    ),
    "bandwidth": Command(
        "figures.settings:BandwidthFigureSettings",
        "bench.speed_report:bandwidth",
        "speed of softmax and lml relative to a copy",
    ),
    "alternatives": Command(
        "figures.settings:AlternativesFigureSettings",
        "bench.alternatives:redraw",
        "time and features of other top-k operators",
    ),
    "own-data": Command(
        "figures.settings:OwnDataFigureSettings",
        "bench.own_data:redraw",
        "results of `torchlml bench own-data` by number of samples",
    ),
    "timing": Command(
        "figures.settings:TimingFigureSettings",
        "bench.paper:timing_figure",
        "the paper's timing study, from `torchlml bench paper`",
    ),
    "cifar100": Command(
        "figures.settings:NoiseFigureSettings",
        "figures.classification:by_noise",
        "accuracy against label noise, from a sweep",
    ),
    "multilabel": Command(
        "figures.settings:MultilabelFigureSettings",
        "figures.multilabel:main",
        "metrics by loss and fraction of labels kept, from sweeps",
    ),
    "scene-graph": Command(
        "figures.settings:SceneGraphFigureSettings",
        "figures.scene_graph:by_epoch",
        "recall by epoch, from a sweep",
    ),
    "recommend": Command(
        "figures.settings:RecommendFigureSettings",
        "figures.multilabel:recommend",
        "recall and nDCG by model and loss, from a sweep",
    ),
    "missing-labels": Command(
        "figures.settings:MissingLabelsFigureSettings",
        "figures.missing_labels:main",
        "mAP and Brier score with one observed label per sample",
    ),
    "scene-graph-bias": Command(
        "figures.settings:BiasFigureSettings",
        "figures.scene_graph:by_bias",
        "recall by type of frequency bias, from a sweep",
    ),
    "which-k": Command(
        "figures.settings:WhichKFigureSettings",
        "figures.classification:by_k",
        "the effect of a wrong k, from `torchlml which-k`",
    ),
}
ALL_FIGURES = Command("figures.settings:AllSettings", "cli:draw_all", "every figure whose data exists")

SINGLE = {
    "demo": Command("studies.settings:DemoSettings", "studies.digits.demo:main"),
    "which-k": Command("studies.settings:WhichKSettings", "studies.digits.which_k:main"),
    "routing": Command("studies.settings:RoutingSettings", "studies.routing:main"),
    "missing-labels": Command("studies.settings:MissingLabelsSettings", "studies.missing_labels.study:main"),
    "info": Command("info:read_arguments", "info:main"),
    "gpu-check": Command("gpu_check:read_arguments", "gpu_check.check_gpu:main"),
}
"""The commands whose first argument is neither a task, benchmark or figure nor a run directory."""

SUMMARIES = {
    "demo": "compare five losses on digits with missing labels (one minute)",
    "which-k": "measure how a wrong value of k affects ranking and calibration",
    "routing": "compare routers for mixtures of experts (several minutes)",
    "missing-labels": "compare losses with one observed label per sample (three hours)",
    "info": "show versions, kernels, threads, devices and extras",
    "gpu-check": "verify and time the Triton kernels on your GPU",
    "bench": "benchmark lml, related operators and losses",
    "train": "train a model on your own files or on a study's data",
    "sweep": "execute a grid of training runs in parallel and write a CSV",
    "evaluate": "evaluate the best checkpoint of a run",
    "predict": "predict with the best checkpoint of a run",
    "export": "export the best checkpoint as an ONNX or PyTorch program",
    "step-time": "time a training step with each of a task's losses",
    "figures": "draw the figures in the documentation and the studies",
}
"""All commands, in the order in which the help lists them."""

CANNOT = {
    "evaluate": "which cannot be evaluated",
    "predict": "which does not support predictions",
    "export": "which cannot be exported",
    "step-time": "whose steps cannot be timed",
}
"""By command: a clause for the error message if the task of a run does not support the command."""
