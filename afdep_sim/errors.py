"""The one exception a user's bad input raises."""


class Refusal(ValueError):
    """An input the project will not run: one sentence that names the value and the bound it breaks.

    Raised before anything runs, so nothing is half done. The command line prints the sentence and exits with 64.
    """
