"""The rules of functions, a file for each family; importing it registers them."""

from adiv_monitor.features.functions import conv, elementwise, embedding, gains, linear, products

del conv, elementwise, embedding, gains, linear, products
