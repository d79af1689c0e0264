"""The reproduction: every table and figure of the papers, computed by the library `rotquant` and rendered."""
