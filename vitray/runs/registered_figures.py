"""Inspection figures of a registered model: artifacts of the run that registers it."""

from vitray.config import Run
from vitray.data.shards import held_out, open_dataset
from vitray.errors import one_line
from vitray.inference.models import describe_network
from vitray.inspection.report.figures import choose_figures
from vitray.inspection.report.inspect_networks import Request, draw_files
from vitray.inspection.report.page import Inspection, log_files
from vitray.inspection.report.subjects import Subject
from vitray.models.network import vit_of
from vitray.runs.run_dir import stored_run
from vitray.tracking.tracker import Tracker
from vitray.training.figures import make_results, read_shown_images

# Where evaluate.figures names none; `vitray inspect` makes the rest.
DEFAULT = ("rollout", "distance")


def log_registered_figures(tracker: Tracker, model: str) -> str | None:
    """Log figures of the model folder of a finished run; return the reason if they cannot be made."""
    try:
        run = stored_run(model.rpartition("/")[0])
        if run.task.traits.saves == "network" and run.model.is_vit:
            log_files(tracker, draw_files(inspect_model(run, model)))
    except Exception as error:  # the model is complete, and registered without them
        return f"the registered model has no figures: {one_line(error)}"
    return None


def inspect_model(run: Run, model: str) -> Inspection:
    """Return evaluate.figures of the model of a run, or else its attention; without images, figures of weights."""
    spec, network = describe_network(model)
    vit = vit_of(network, "inspection")
    images = views_BHWC = None
    command = Request(spec.url)
    if run.data.evaluated and run.evaluate.examples:
        assert run.data.url is not None
        dataset = open_dataset(run.data.url)
        images = read_shown_images(run, dataset, held_out(dataset, run.data))
        views_BHWC = images.shown_views(spec)
        command = command._replace(words=[dataset.url], split=run.data.evaluated, images=run.evaluate.examples)
    names = run.evaluate.figures or (DEFAULT if images else choose_figures([], has_images=False, has_two=False))
    subject = Subject(spec.name, spec, vit, images, views_BHWC)
    text = "" if run.data.held_out else command._replace(figures=list(names)).command
    return Inspection([subject], images, make_results(subject, names), text)
