"""The fork server has DeepSpeed."""

from __future__ import annotations

from tests.engines.deepspeed import imported
from tests.imported_once import import_in_server

import_in_server(imported.__name__)
