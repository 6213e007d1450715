"""How far is the activation update that training really makes from the ideal one?"""

__version__ = "0.1.0"
