"""Work that can be interrupted: what there is to do, where it is kept, who does it."""
