"""A page in a headless browser, for the tests of the pages.  The browser is the fixture `browser` of conftest.py."""
import json
import time

CHROMIUM = '/usr/bin/chromium'


class Page:
    """A page of the browser with its requests and its errors.   options: of browser.new_page"""

    def __init__(self, browser, url, **options):
        self.tab = browser.new_page(**{'viewport': {'width': 1280, 'height': 900}, 'color_scheme': 'light',
                                       'reduced_motion': 'reduce'} | options)
        self.requests, self.failures = [], []
        self.tab.on('request', lambda request: self.requests.append(request.url))
        self.tab.on('pageerror', lambda error: self.failures.append(str(error)))
        self.tab.on('console', lambda message: self.failures.append(message.text))
        self.tab.goto(url)

    def ask(self, expression):
        return self.tab.evaluate(f'() => {expression}')

    def until(self, expression, expected=True, seconds=120):
        """Wait until an expression has a value."""
        end = time.monotonic() + seconds
        while (got := self.ask(expression)) != expected:
            assert time.monotonic() < end, f'{expression} is {got!r}, expected {expected!r}; {self.failures}'
            time.sleep(0.02)

    def text(self, selector):
        return self.ask(f'document.querySelector({json.dumps(selector)}).textContent')
