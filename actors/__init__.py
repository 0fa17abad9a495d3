"""Thin Ray shells around the core: ranks, coordinator, storage, the Serve deployment and the admin gateway."""
