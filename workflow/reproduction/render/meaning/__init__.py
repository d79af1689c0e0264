"""The meaning of a page in three sentences, from its judged claims and its numbers alone.

The first is about the headline claim, with our number and the paper's. The second reports the other claims that hold or
are open; the third those that fail, with their cause, or cannot be tested. Nothing is decided here.
"""
