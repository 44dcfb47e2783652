"""Pages that show a run, or compare several. They open from disk, without a server and without a script."""

from trinity_lightning.monitor.report.charts import line_chart as line_chart
from trinity_lightning.monitor.report.charts import nice_ticks as nice_ticks
from trinity_lightning.monitor.report.charts import stacked_bars as stacked_bars
from trinity_lightning.monitor.report.charts import thinned as thinned
from trinity_lightning.monitor.report.hiding import hidden as hidden
from trinity_lightning.monitor.report.hiding import without_secrets as without_secrets
from trinity_lightning.monitor.report.page import report_page as report_page
from trinity_lightning.monitor.report.record import RunRecord as RunRecord
from trinity_lightning.monitor.report.record import read_run as read_run
from trinity_lightning.monitor.report.texts import ENVIRONMENT as ENVIRONMENT
from trinity_lightning.monitor.report.texts import labels as labels
from trinity_lightning.monitor.report.texts import short as short
from trinity_lightning.monitor.report.texts import visible as visible
