"""Functions with which trainers handle batches: padding, named columns, splitting over data-parallel ranks."""
