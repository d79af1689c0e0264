"""Operators that decode on a CPU (SpinQuant Table 6): `decoding.cpp`, its compilation at first use, and references."""
