"""What docs/timeline.md leaves to the reader."""

import hvlike as hvd
