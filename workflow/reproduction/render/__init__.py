"""Reports: one model of a page and its renderings, figures, MLflow."""
