"""What a page means, in three sentences, from its judged claims and its numbers alone.

The first is about the headline claim, with our number and the paper's; the second says what else holds and what is
open; the third what does not hold, with its cause, or cannot be tested. Nothing here decides anything.
"""
