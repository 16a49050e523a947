"""`stalloc report`: one self-contained page that shows a program's memory; opened from disk, it asks no network."""

from stalloc.writers.page.page import page_text as page_text
from stalloc.writers.page.page import write_page as write_page
