"""The report of a sweep: an HTML page and its pictures, drawn from plain values. No Ray, no MLflow."""

from vitray.sweeps.report.papers import is_imagenet as is_imagenet
from vitray.sweeps.report.papers import paper_result as paper_result
from vitray.sweeps.report.trials import Measure as Measure
from vitray.sweeps.report.trials import SweepResult as SweepResult
from vitray.sweeps.report.trials import TrialResult as TrialResult
from vitray.sweeps.report.trials import leader as leader
from vitray.sweeps.report.writing import write_report as write_report
