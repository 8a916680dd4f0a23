"""Verify the claims of the paper (Amos, Koltun and Kolter, 2019) with independent computations.

The expected values come from a general solver (scipy), a bisection (`truth.py`), a linear system (numpy) or
an enumeration, never from the library.
"""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, linprog, minimize
from scipy.spatial import ConvexHull

import torchlml
import torchlml.bracketing
from tests.support import truth
from torchlml._solve.newton import residual
from torchlml.metrics import TopKRecall
from torchlml_lab.figures.geometry import SURFACES, binary_entropy, entropy, in_space, points, vertices
from torchlml_lab.figures.projection import papers_bracket, proven_bracket


def rows(number, n, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, n, generator=generator, dtype=torch.float64) * scale


def argmin(x, penalty, slope, total=None):
    """Find the y in the open unit cube with the given sum that minimizes -x.y - penalty(y), by SLSQP."""
    n = len(x)
    constraints = [] if total is None else [LinearConstraint(np.ones((1, n)), total, total)]
    found = minimize(
        lambda y: -x @ y - penalty(y),
        np.full(n, 0.5 if total is None else total / n),
        jac=lambda y: -x - slope(y),
        bounds=[(1e-9, 1 - 1e-9)] * n,
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return found.x


def h(y):
    return -(y * np.log(y)).sum()


def dh(y):
    return -np.log(y) - 1


def h_b(y):
    return h(y) + h(1 - y)


def dh_b(y):
    return np.log1p(-y) - np.log(y)


# Section 3: the polytope and the projection.


@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (4, 2), (6, 3)])
def test_the_corners_of_the_polytope_are_the_sets_of_k_labels(n, k):
    corners = vertices(n, k)
    assert len(corners) == math.comb(n, k)
    generator = np.random.default_rng(n)
    reached = set()
    for _ in range(150):
        c = generator.normal(size=n)
        # A linear program over the polytope, {0 <= p <= 1, sum p = k}, has a solution at a corner.
        best = linprog(-c, A_eq=np.ones((1, n)), b_eq=[k], bounds=(0, 1))
        distance = np.abs(corners.numpy() - best.x).max(1)
        assert distance.min() < 1e-9
        reached.add(int(distance.argmin()))
    assert len(reached) == len(corners)


def test_l_4_2_is_an_octahedron():
    space = in_space(vertices(4, 2)).numpy()
    hull = ConvexHull(space)
    assert (len(hull.vertices), len(hull.simplices)) == (6, 8)
    lengths = sorted(math.dist(a, b) for a, b in combinations(space, 2))
    assert lengths == pytest.approx([math.sqrt(2)] * 12 + [2] * 3)


def test_l_n_1_is_the_simplex():
    # Every row maps to a point of the simplex, and every interior point is the image of some row.
    y = torchlml.lml(rows(50, 7, 10.0), 1)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-11)
    points = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(7), 50))
    torch.testing.assert_close(torchlml.lml(torch.logit(points), 1), points, rtol=0, atol=1e-11)
    assert (vertices(7, 1) == torch.eye(7)).all()
    # LML has the same set of outputs as softmax, but it is a different function.
    assert (y - torch.softmax(rows(50, 7, 10.0), 1)).abs().max() > 0.01


@pytest.mark.parametrize("seed", range(4))
def test_lml_solves_equation_1(seed):
    x, k = rows(1, 8, seed=seed)[0], 3
    torch.testing.assert_close(
        torchlml.lml(x, k), torch.from_numpy(argmin(x.numpy(), h_b, dh_b, k)), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("k", [1, 4, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_proposition_1_the_order_is_preserved(scale, k, dtype):
    x = rows(30, 20, scale, seed=k).to(dtype)
    x[:, 7] = x[:, 3]  # a tie
    y = torchlml.lml(x, k)
    order = x.argsort(1, descending=True)
    assert (y.gather(1, order).diff(dim=1) <= 0).all()
    assert (y[:, 7] == y[:, 3]).all()
    # Rounding may make neighboring entries equal, but not in float64 without saturation.
    if dtype == torch.float64 and scale <= 1:
        distinct = x.gather(1, order).diff(dim=1) < 0
        assert (y.gather(1, order).diff(dim=1)[distinct] < 0).all()


# Section 3.1: finding the dual variable.


@pytest.mark.parametrize("seed", range(5))
def test_algorithm_1_finds_the_root(seed):
    x = rows(3, 40, seed=seed)
    nu = torchlml.lml_bracketing(x, 5)
    expected = [truth.solve(row.numpy(), 5).nu for row in x]
    torch.testing.assert_close(nu, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_algorithm_1_reaches_machine_epsilon_in_less_than_10_iterations_of_100_samples(dtype, monkeypatch):
    evaluations: list[None] = []

    def counted(*arguments):
        evaluations.append(None)
        return residual(*arguments)

    monkeypatch.setattr(torchlml.bracketing, "residual", counted)
    for n, k, scale in ((10, 2, 3.0), (200, 5, 1.0), (200, 100, 10.0)):
        evaluations.clear()
        x = rows(2, n, scale).to(dtype)
        y = torch.sigmoid(x + torchlml.lml_bracketing(x, k, samples=100).unsqueeze(-1))
        assert 0 < len(evaluations) / 100 < 10
        for row, answer in zip(x, y, strict=True):
            expected = torch.from_numpy(truth.solve(row.double().numpy(), k).y)
            assert (answer.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps


def test_the_papers_interval_misses_the_root_where_the_proven_one_does_not():
    x, k = torch.zeros(1098, dtype=torch.float64), 1097
    nu = math.log(1097)  # sigmoid(nu) = 1097 / 1098
    low, high = papers_bracket(x, k)
    assert not low <= nu <= high
    low, high = proven_bracket(x, k)
    assert low <= nu <= high + 1e-6
    for seed in range(50):
        n = 2 + seed
        x = rows(1, n, 10 ** (seed % 5 - 2), seed)[0]
        for k in {1, n // 2, n - 1}:
            low, high = proven_bracket(x, k)
            nu = truth.solve(x.numpy(), k).nu
            assert low - 1e-6 <= nu <= high + 1e-6, (seed, k)


# Section 3.2: the backward pass.


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_backward_pass_equals_a_numerical_solution_of_the_kkt_system(k):
    n = 9
    x = rows(1, n, 2.0, seed=k)[0].requires_grad_()
    gradient = rows(1, n, 1.0, seed=100 + k)[0]
    y = torchlml.lml(x, k)
    (ours,) = torch.autograd.grad(y, x, gradient)
    p = truth.solve(x.detach().numpy(), k).y
    system = np.zeros((n + 1, n + 1))
    system[:n, :n] = np.diag(1 / p + 1 / (1 - p))
    system[:n, n] = system[n, :n] = -1
    d = np.linalg.solve(system, -np.append(gradient.numpy(), 0))
    torch.testing.assert_close(ours, torch.from_numpy(-d[:n]), rtol=0, atol=1e-12)


# Section 4: maximum likelihood recovers the unobserved labels.

CONTEXTS, LABELS, K = 12, 8, 3


class Realizable:
    """A data set with twelve contexts, each with three of eight labels. Each sample has one observed label.

    The logits are a table plus a bias for each label, so the model can represent the true labels. Every label
    is true in some context.
    """

    def __init__(self):
        sets = list(combinations(range(LABELS), K))
        generator = torch.Generator().manual_seed(1)
        chosen = torch.randperm(len(sets), generator=generator)[:CONTEXTS].tolist()
        self.true = torch.zeros(CONTEXTS, LABELS, dtype=torch.bool)
        for context, which in enumerate(chosen):
            self.true[context, list(sets[which])] = True
        assert self.true.any(0).all()
        # Each true label of a context is observed in three samples.
        self.context, self.observed = self.true.repeat(3, 1).nonzero().T
        self.context = self.context % CONTEXTS

    def train(self, loss):
        table = torch.zeros(CONTEXTS, LABELS, requires_grad=True)
        bias = torch.zeros(LABELS, requires_grad=True)
        for _ in range(200):
            value = loss((table + bias)[self.context], self.observed)
            with torch.no_grad():
                for weight, slope in zip(
                    (table, bias), torch.autograd.grad(value, (table, bias)), strict=True
                ):
                    weight -= 30 * slope
        return (table + bias).detach(), value.item()


def test_proposition_2_lml_recovers_the_unobserved_labels():
    problem = Realizable()
    logits, loss = problem.train(lambda x, label: torchlml.lml_loss(x, label, K))
    p = torchlml.lml(logits, K)
    likelihood = torch.where(problem.true, p, 1 - p).prod(1)
    assert loss < 0.02
    assert likelihood.min() > 0.9
    assert ((p > 0.5) == problem.true).all()
    # Corollary: the recall of the observed labels is maximal.
    recall = TopKRecall(k=K)
    recall.update(logits[problem.context], problem.observed)
    assert recall.compute() == 1


def test_proposition_2_fails_for_sigmoids_which_collapse():
    problem = Realizable()
    logits, loss = problem.train(
        lambda x, label: -torch.nn.functional.logsigmoid(x.gather(1, label.unsqueeze(1))).mean()
    )
    p = torch.sigmoid(logits)
    assert loss < 0.02  # the loss is as small as with LML
    assert p.min() > 0.9  # but every label is predicted in every context
    assert torch.where(problem.true, p, 1 - p).prod(1).max() < 0.01


def test_a_softmax_on_an_edge_cannot_represent_two_relations():
    # Section 4.2: the likelihood of both relations is at most 1/4 with softmax, and near 1 with LML.
    x = torch.tensor([20.0, 20.0, 0.0, 0.0])
    assert torch.softmax(x, 0)[:2].prod() <= 0.25
    assert torchlml.lml(x, 2)[:2].prod() > 0.99


@pytest.mark.parametrize("k", [20, 50, 100])
def test_a_scene_graph_row_of_19000_fits_and_is_exact(k):
    n = 20 * 19 * 50
    assert n == 19_000
    x = rows(1, n, 4.0, seed=k)[0].float().requires_grad_()
    expected = truth.solve(x.detach().double().numpy(), k)
    y = torchlml.lml(x, k)
    assert abs(y.double().sum().item() - k) <= 2e-6 * k
    torch.testing.assert_close(y.double(), torch.from_numpy(expected.y), rtol=0, atol=1e-6)
    # Check the loss of the observed relations in a jagged batch of this image and a smaller one.
    values = torch.cat([x, torch.zeros(600)])
    offsets = torch.tensor([0, n, n + 600])
    relations = torch.tensor([3, 17, 18_999, n + 5])
    loss = torchlml.lml_loss(values, relations, k, offsets=offsets, reduction="none")
    by_hand = [-math.log(expected.y[j]) for j in (3, 17, 18_999)]
    assert loss.tolist() == pytest.approx([sum(by_hand), -math.log(k / 600)], rel=1e-5)
    (gradient,) = torch.autograd.grad(loss[0], x)
    assert gradient[[3, 17, 18_999]].max() < 0
    assert gradient.sum().item() == pytest.approx(0, abs=1e-4)


# Appendix A: the truncated entropy.


def test_appendix_a_the_truncated_entropy_is_small_when_the_top_k_error_is_zero():
    x = torch.zeros(1, 50)
    x[0, :5] = 30.0
    label = torch.tensor([4])  # one of five tied entries, so it is in the top 5
    assert torchlml.truncated_entropy_loss(x, label, 5).item() < 1e-10
    assert torchlml.truncated_entropy_loss(x, label, 4).item() == pytest.approx(math.log(2))


# Appendix C: the entropies.


@pytest.mark.parametrize("seed", range(4))
def test_theorem_1_the_sigmoid_is_a_projection_onto_the_cube(seed):
    x = rows(1, 6, 2.0, seed)[0]
    torch.testing.assert_close(
        torch.sigmoid(x), torch.from_numpy(argmin(x.numpy(), h_b, dh_b)), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("seed", range(4))
def test_theorem_2_the_softmax_is_a_projection_onto_the_simplex(seed):
    x = rows(1, 6, 2.0, seed)[0]
    torch.testing.assert_close(
        torch.softmax(x, 0), torch.from_numpy(argmin(x.numpy(), h, dh, 1)), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_constrained_softmax_uses_the_other_entropy_on_the_same_set(seed):
    x, k = rows(1, 8, 1.0, seed)[0], 3
    torch.testing.assert_close(
        torchlml.constrained_softmax(x, k), torch.from_numpy(argmin(x.numpy(), h, dh, k)), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_the_center_has_the_highest_entropy_and_the_corners_the_lowest(surface):
    _, y = points(surface)
    heights = surface.height(y)
    center = torch.tensor(surface.corners, dtype=torch.float64).mean(0)
    torch.testing.assert_close(y[heights.argmax()], center, rtol=0, atol=1e-6)
    corner = ((y == 0) | (y == 1)).all(1)
    assert heights[corner].max() < 1e-12
    assert corner.sum() == len(surface.corners)
    assert heights[~corner].min() > 0.01


def test_the_surface_of_lml_resembles_that_of_softmax_more_than_constrained_softmax_does():
    # The corners of L(3,2) are 1 minus those of the simplex, so y is compared with 1 - y on the simplex.
    weights, y = points(SURFACES[2])
    q = 1 - y

    def share(heights):
        return heights / heights.max()

    assert weights.shape == q.shape
    from_lml = (share(binary_entropy(y)) - share(entropy(q))).square().mean()
    from_constrained = (share(entropy(y)) - share(entropy(q))).square().mean()
    assert from_lml < 0.5 * from_constrained
