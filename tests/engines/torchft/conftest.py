"""The fork server has torchft."""

from __future__ import annotations

from tests.imported_once import import_in_server

import_in_server("torchft")
