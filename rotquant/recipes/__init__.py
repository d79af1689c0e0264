"""Everything that can be asked for, as frozen data without torch: schemes, recipes, presets, metrics, corpora."""
