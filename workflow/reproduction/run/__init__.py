"""The plan, the stages and the processes that compute them, and the states of their outputs."""
