"""`torchlml which-k`: the images, the information given to each method, the command and its figure."""

import torch

from tests.support.command_lines import each_rejection, rejected, rejections
from torchlml_lab import cli
from torchlml_lab.studies.digits import model, which_k
from torchlml_lab.studies.digits.model import SCALED
from torchlml_lab.studies.digits.which_k import AT_MOST, EXACTLY, PREDICTED, TRUE_K


def test_images_of_one_to_five_digits():
    train, test = model.make(5, 2000, 300, "uniform", seed=1, varying=True)
    for part in (train, test):
        drawn = part.pixels.unflatten(2, (5, 8)).abs().sum((1, 3)) > 0
        assert torch.equal(drawn.sum(1), part.present.sum(1))
        assert part.present.gather(1, part.named.unsqueeze(1)).all()
    number = train.present.sum(1)
    assert torch.bincount(number, minlength=6)[1:].min() > 300  # 400 images are expected per number of digits
    # All positions are equally likely to show a digit.
    assert (train.pixels.unflatten(2, (5, 8)).abs().sum((1, 3)) > 0).float().mean(0).std() < 0.03


def test_sums_of_the_probabilities():
    torch.manual_seed(0)
    outputs, number = torch.randn(2, 3, 11), torch.tensor([[1.0, 2, 3], [4, 5, 2]])
    outputs[..., 10] = torch.tensor([[-1.0, 0.5, 2.5], [12, 3, 4]])  # the predicted k
    k = torch.tensor([[7.0], [5.0]])
    free = outputs[..., :10].sigmoid().sum(-1)
    assert (free < k).any()
    assert (free > k).any()
    expected = {
        EXACTLY: k.expand(2, 3),
        AT_MOST: free.minimum(k),
        TRUE_K: number,
        PREDICTED: outputs[..., 10].clamp(0, 10),
    }
    for method, total in expected.items():
        torch.testing.assert_close(which_k.probability(method, outputs, number, k).sum(-1), total)
    scaled = number.unsqueeze(-1) * outputs[..., :10].softmax(-1)
    torch.testing.assert_close(which_k.probability(SCALED, outputs, number, k), scaled.clamp(max=1))


def test_each_method_uses_only_its_stated_information():
    """The number of digits affects only the losses of the two methods that receive it."""
    torch.manual_seed(0)
    outputs, observed = torch.randn(2, 4, 11), torch.zeros(2, 4, 10, dtype=torch.bool)
    observed[..., 3] = True
    one, other = torch.full((2, 4), 2.0), torch.full((2, 4), 3.0)
    k = torch.tensor([[1.0], [6.0]])
    for method in {method for _, _, method in which_k.PLAN}:
        losses = [which_k.loss_of(method, outputs, observed, number, k) for number in (one, other)]
        assert losses[0].shape == (2, 4)
        assert torch.equal(*losses) == (method not in (TRUE_K, PREDICTED)), method
        more = which_k.loss_of(method, outputs, observed, one, k + 1)
        assert torch.equal(more, losses[0]) == (method not in (EXACTLY, AT_MOST)), method
    head = which_k.loss_of(PREDICTED, outputs, observed, one, k)
    told = which_k.loss_of(TRUE_K, outputs, observed, one, k)
    torch.testing.assert_close(head - told, (outputs[..., 10] - 2).square())


def test_the_command_and_its_figure(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(which_k, "KS", (1, 3))
    path, picture = tmp_path / "a" / "k.csv", tmp_path / "k.png"
    words = ["which-k", "--seeds", "2", "--images", "100", "--epochs", "1", "--csv", str(path)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "images with 1 to 5 digits, all labeled" in said
    assert max(len(line) for line in said.splitlines() if "The results are in" not in line) <= 80
    rows = which_k.TABLE.read(path, "--csv")
    assert len(rows) == 2 * (7 + 9 + 9)
    assert {row.seed for row in rows} == {0, 1}
    assert cli.main(["figures", "which-k", "--csv", str(path), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = picture.with_suffix(".md").read_text().splitlines()
    first = [row for row in rows if (row.digits, row.method, row.k) == ("3 digits", "lml", 3)]
    recall = 50 * sum(row.recall for row in first)
    assert [line for line in lines if line.startswith(f"| lml | 3 | 2 | {recall:.1f}±")]


@each_rejection(
    rejections("`{}` must be at least 1, but it is {}", "--seeds 0", "--epochs 0"),
    rejections("`{}` must be at least 100, but it is {}", "--images 5"),
)
def test_bad_options(capsys, options, needle):
    assert needle in rejected(capsys, ["which-k", *options])


def test_an_unwritable_path_is_rejected_before_any_work(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(which_k, "run", None)
    (tmp_path / "file").write_text("")
    assert "(`--csv`) cannot be written" in rejected(
        capsys, ["which-k", "--csv", tmp_path / "file" / "x.csv"]
    )
