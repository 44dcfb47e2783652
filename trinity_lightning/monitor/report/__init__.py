"""A run as one page that opens from disk: `report_page(read_run(folder))`."""

from trinity_lightning.monitor.report.page import report_page as report_page
from trinity_lightning.monitor.report.record import KeptStep as KeptStep
from trinity_lightning.monitor.report.record import RunRecord as RunRecord
from trinity_lightning.monitor.report.record import read_run as read_run
