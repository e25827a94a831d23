from jaxlsgd.simulation import *  # noqa
