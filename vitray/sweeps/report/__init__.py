"""The report of a sweep: an HTML page and its pictures, drawn from plain values. No Ray, no MLflow."""

from vitray.sweeps.report.page import write_report as write_report
from vitray.sweeps.report.papers import is_imagenet as is_imagenet
from vitray.sweeps.report.papers import paper_result as paper_result
from vitray.sweeps.report.results import Measure as Measure
from vitray.sweeps.report.results import SweepResult as SweepResult
from vitray.sweeps.report.results import TrialResult as TrialResult
from vitray.sweeps.report.results import leader as leader
