"""Carriers of expert bytes; one file each, all behind `base.Transport`."""
