"""Where bytes are reduced and moved: one small file a plane, one interface."""
