"""What a configuration takes and what of it fits, from headers of files and a model without weights."""
