"""Pages and pictures for people."""

from darknight.report.charts import Curve, curves_chart, matrix_chart
from darknight.report.image_rows import Row, image_rows
from darknight.report.shares_picture import shares_picture

__all__ = ["Curve", "Row", "curves_chart", "image_rows", "matrix_chart", "shares_picture"]
