"""A rehearsal of config/paper.yaml: every kind of cell once, with reduced amounts, on random weights.

It shows on a machine with one large GPU, in some 10 minutes, what each kind takes and whether it works at all, before
hours are spent. The stages are those of `rotquant runs execute`; a kind that fails does not stop the others.
"""
