"""The plan, the stages, the processes that compute them, and the states of their outputs."""
