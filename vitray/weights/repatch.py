"""A network at another patch size: its stem resized by the pseudo-inverse, its positions as recorded (FlexiViT)."""

from dataclasses import replace

from vitray.config import Model
from vitray.errors import ConfigError
from vitray.models.stems import resize_kernel
from vitray.models.vit import ViT
from vitray.weights.folder import LoadedModel, SavedModel, open_weights, save_model

KERNEL = "stem.proj.0.weight"


def repatch_model(url: str, patch: int, target: str, image_size: int | None = None) -> SavedModel:
    """Write a network with patches of another size as a model folder, and return the folder's size."""
    run, vit, classes = repatched(open_weights(url), patch, url, image_size)
    return save_model(target, run, vit, classes)


def repatched(loaded: LoadedModel, patch: int, url: str, image_size: int | None = None) -> LoadedModel:
    """Return a network with patches of another size, at its own image size or a given one."""
    run, old, classes = loaded
    run.model.require_vit(f"{url}: another patch size")
    assert isinstance(old, ViT)
    model = _model_at(old.model, patch, url, image_size)
    run = run.replace({"model": model.model_dump(mode="json")})
    new = ViT(run.model)
    state = old.state_dict() | old.positions_at(new.model.grid)
    new.load_state_dict(state | {KERNEL: resize_kernel(state[KERNEL], patch)})
    return LoadedModel(run, new.eval(), classes)


def _model_at(model: Model, patch: int, url: str, image_size: int | None) -> Model:
    if not model.shape.traits.is_resizable:
        raise ConfigError(
            f"{url}: got {model.name}, expected a linear stem: only its kernel is resized to other patches"
        )
    if model.positions.kind == "relative":
        raise ConfigError(f"{url}: relative positions are those of one grid; expected other positions")
    size = model.image_shape if image_size is None else (image_size, image_size)
    if patch < 1 or any(side % patch or not side for side in size):
        sides = " x ".join(map(str, size))
        below = max(size[0] // max(patch, 1), 1) * max(patch, 1)
        raise ConfigError(
            f"{url}: got patches of {patch} for images of {sides} px, expected a size that divides them, or"
            f" --image-size {below} or {below + max(patch, 1)}"
        )
    name = str(replace(model.shape, patch=patch))
    side = size[0] if size[0] == size[1] else size
    return Model.model_validate({**model.model_dump(), "name": name, "image_size": side, "patches": ()})
