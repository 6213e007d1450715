"""The rules of functions, a file for each family; importing it registers them."""

from adiv_monitor.features.functions import conv, embedding, gains, linear, products

del conv, embedding, gains, linear, products
