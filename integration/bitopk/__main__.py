# SPDX-License-Identifier: Apache-2.0
"""``python -m bitopk``: the same as the ``bitopk`` command."""

import sys

from bitopk.cli import main

if __name__ == "__main__":
    sys.exit(main())
