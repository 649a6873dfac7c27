"""LeJEPA: the views of an image predict the mean of its global views, and all projections are normally distributed.

Shapes: B images of this worker, V global views, v local ones, A all of them, C colors, K projected numbers, M slices
(directions), T knots of the integral over the frequency t.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitray.config import Run
from vitray.config.sections import in_steps
from vitray.config.self_supervised import Lejepa, length_alone
from vitray.data.augment.keyed_random import step_generator
from vitray.data.augment.mixing import to_device
from vitray.models.precision import at_least_float32, without_autocast
from vitray.models.products import Products
from vitray.models.stems import sum_over_workers
from vitray.models.vit import ViT
from vitray.weights.freezing import prepare

# The integral over t from 0 to 3, by the trapezoidal rule; the one from -3 is equal.
KNOTS, LARGEST = 17, 3.0


class JointPrediction(nn.Module):
    """A ViT and a projection of its features."""

    directions: Tensor
    fixed_directions: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        task, model = run.task, run.model
        assert isinstance(task, Lejepa)
        self.settings, self.seed, self.views = task, run.seed, run.data.chosen_views
        self.vit = ViT(model)
        if task.weights is not None:
            prepare(self.vit, task)
        hidden = task.hidden_width(model.shape.size)
        self.head = Projector(model.shape.size, hidden, task.projection)
        for name in ("directions", "fixed_directions"):
            self.register_buffer(name, torch.empty(task.projection, task.slices), persistent=False)
        self._draw(self.fixed_directions, 0, "evaluation")
        self.holds_network = False
        self._sums = dict.fromkeys((True, False), torch.zeros(3, dtype=torch.float64))

    def before_step(self, step: int, epoch: int, total: int) -> None:
        """Draw the directions of a step, the same on every worker."""
        del total
        self.holds_network = step < in_steps(length_alone(self.settings), epoch)
        self._draw(self.directions, step, "directions")

    def after_backward(self) -> None:
        """Drop the gradients of what this step does not train."""
        if self.holds_network:
            for parameter in self.vit.parameters():
                parameter.grad = None

    def after_step(self) -> None:
        """Change nothing but what the optimizer has."""

    def forward(self, images_BVCHW: Tensor, views_BvChw: Tensor) -> Tensor:
        """Return the loss of the whole batch, the images of all workers."""
        features = [self.vit(images_BVCHW.flatten(0, 1))]
        if views_BvChw.shape[1]:
            features.append(self.vit(views_BvChw.flatten(0, 1)))
        projected = self.head(torch.cat(features))
        with without_autocast(projected.device):
            return self._loss(at_least_float32(projected), images_BVCHW.shape[:2])

    def _loss(self, projected: Tensor, shape: torch.Size) -> Tensor:
        large_BVK = projected[: shape.numel()].unflatten(0, shape)
        parts = [large_BVK]
        if len(projected) > shape.numel():
            parts.append(projected[shape.numel() :].unflatten(0, (shape[0], -1)))
        all_BAK = torch.cat(parts, dim=1)
        prediction = (all_BAK - large_BVK.mean(dim=1, keepdim=True)).square().mean(dim=(1, 2)).sum()
        directions_KM = self.directions if self.training else self.fixed_directions
        waves_2TAM = wave_sums(all_BAK.transpose(0, 1) @ directions_KM)
        count = prediction.new_full((), shape[0])
        sums = sum_over_workers(torch.cat([count[None], prediction[None], waves_2TAM.flatten()]))
        count, prediction = sums[0].detach(), sums[1] / sums[0].detach()
        normality = epps_pulley(sums[2:].view_as(waves_2TAM) / count, count).mean()
        weight, both = self.settings.weight, torch.stack([prediction.detach(), normality.detach()])
        self._sums[self.training] = self._sums[self.training].to(both.device) + torch.cat([both, both.new_ones(1)])
        return (1 - weight) * prediction + weight * normality

    def read_metrics(self, *, training: bool) -> dict[str, float]:
        """Return the means of both parts of the loss since the last call, in one mode."""
        prediction, normality, passes = self._sums[training].tolist()
        self._sums[training] = torch.zeros(3, dtype=torch.float64)
        return {"prediction": prediction / passes, "normality": normality / passes} if passes else {}

    def count(self, products: Products) -> None:
        """Count the products of a training step for an image, over all its views."""
        views, model = self.views, self.vit.model

        def count_view(size: tuple[int, int], products: Products) -> None:
            self.vit.count_tokens(products, size=size)
            products.train(self.vit.norm)
            self.head.count(products)

        products.repeat(views.large.count, partial(count_view, views.large_size(model.image_shape)))
        if views.small is not None:
            size = views.small_size(model.image_shape, model.shape.patch)
            products.repeat(views.small.count, partial(count_view, size))

    def _draw(self, directions_KM: Tensor, step: int, purpose: str) -> None:
        if directions_KM.is_meta:
            return
        rng = torch.Generator().manual_seed(int(step_generator(self.seed, step, purpose).integers(2**63)))
        drawn_KM = torch.randn(directions_KM.shape, generator=rng)
        directions_KM.copy_(to_device(drawn_KM / drawn_KM.norm(dim=0), directions_KM.device))


class Projector(nn.Module):
    """Two hidden layers with batch norms over the views of all images, and a linear one."""

    def __init__(self, width: int, hidden: int, projection: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        # Of images of one pixel: their norms are joined over workers as those of a stem are.
        self.first_norm, self.second_norm = nn.BatchNorm2d(hidden), nn.BatchNorm2d(hidden)
        self.last = nn.Linear(hidden, projection)

    def forward(self, features_ND: Tensor) -> Tensor:
        """Return the projections, NK."""
        for layer, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            features_ND = norm(layer(features_ND)[:, :, None, None]).flatten(1).relu()
        return self.last(features_ND)

    def count(self, products: Products) -> None:
        """Count the products of a view."""
        for layer, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            products.layer(layer, 1)
            products.train(norm)
        products.layer(self.last, 1)


# ---- the sliced Epps-Pulley statistic --------------------------------------------------------------------------------


class WaveSums(torch.autograd.Function):
    """The sums over images of cos(t x) and sin(t x), 2TAM, of numbers x (ABM) at the knots but t = 0.

    The knots are at equal distances, so that all waves of a number come from its first one by products, and neither
    they nor their gradients are ever held for more than one knot: memory would grow by the number of knots.
    """

    @staticmethod
    def forward(ctx: Any, x_ABM: Tensor) -> Tensor:
        ctx.save_for_backward(x_ABM)
        return torch.stack([torch.stack([cos.sum(1), sin.sum(1)]) for _, cos, sin in _waves(x_ABM)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        [x_ABM], gradient_2TA1M = ctx.saved_tensors, grad_outputs[0][:, :, :, None]
        total_ABM = torch.zeros_like(x_ABM)
        for knot, (t, cos, sin) in enumerate(_waves(x_ABM)):
            of_cos, of_sin = gradient_2TA1M[:, knot]
            total_ABM.add_(of_sin * cos - of_cos * sin, alpha=t)
        return total_ABM


def _waves(x_ABM: Tensor) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield t, cos(t x) and sin(t x) at each knot but t = 0."""
    step = LARGEST / (KNOTS - 1)
    first_cos, first_sin = (step * x_ABM).cos(), (step * x_ABM).sin()
    cos, sin = first_cos, first_sin
    for knot in range(1, KNOTS):
        yield knot * step, cos, sin
        cos, sin = cos * first_cos - sin * first_sin, sin * first_cos + cos * first_sin


def wave_sums(x_ABM: Tensor) -> Tensor:
    """Return the sums over images of the waves of projections along each direction, 2TAM."""
    return WaveSums.apply(x_ABM)  # pyright: ignore[reportReturnType]


def epps_pulley(means_2TAM: Tensor, count: Tensor) -> Tensor:
    """Return the statistic of each view and direction (AM) from the means over `count` images.

    It is count times the integral of |mean of exp(i t x) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) over t. At t = 0 the
    difference is 0.
    """
    step = LARGEST / (KNOTS - 1)
    t_T = step * torch.arange(1, KNOTS, dtype=means_2TAM.dtype, device=means_2TAM.device)
    normal_T11 = (-t_T.square() / 2).exp()[:, None, None]
    width_T11 = torch.full_like(normal_T11, 2 * step)
    width_T11[-1] = step
    error_TAM = (means_2TAM[0] - normal_T11).square() + means_2TAM[1].square()
    return count * (error_TAM * normal_T11 * width_T11).sum(0)
