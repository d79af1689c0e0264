"""Tests of the reproduction and of what both packages do together."""
